"""The events of a training on the client: live or recorded, as tables and in words."""

__all__ = [
    "changes",
    "clocks",
    "collective_summary",
    "comparison",
    "event_tables",
    "history",
    "model_kinds",
    "model_registry",
    "recorded",
    "records",
    "steady_steps",
    "summary",
    "tables",
    "timeline",
    "what_if",
]
