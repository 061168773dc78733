"""Dense arrays of event times by step, rank and bucket."""

__all__ = ["activity", "gradients", "span_columns", "step_table"]
