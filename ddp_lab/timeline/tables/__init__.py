"""Dense arrays of event times by step, rank and bucket."""

__all__ = [
    "activity",
    "collectives",
    "gradients",
    "memory",
    "parameter_groups",
    "span_columns",
    "step_table",
]
