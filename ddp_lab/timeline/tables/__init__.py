"""Dense arrays of event times by step, rank and bucket."""

__all__ = ["gradients", "span_columns", "step_table"]
