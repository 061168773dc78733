"""From times to statements: what happened in steps that were recorded. Pure functions on numpy arrays."""

__all__ = [
    "check_reports",
    "clocks",
    "collectives",
    "comparison",
    "findings",
    "parameter_groups",
    "step_metrics",
    "step_parts",
    "steps",
    "stragglers",
]
