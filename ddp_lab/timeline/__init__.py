"""The events of a training on the client: live or recorded, as tables and in words."""

__all__ = [
    "changes",
    "clocks",
    "comparison",
    "group_words",
    "history",
    "judged_steps",
    "model",
    "model_kinds",
    "models",
    "recorded",
    "records",
    "summary",
    "tables",
    "timeline",
    "what_if",
]
