"""Dense arrays of what happened when, by step, rank and bucket."""

__all__ = ["gradients", "span_columns", "step_table"]
