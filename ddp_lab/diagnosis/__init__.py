"""Why ranks make no progress: what each of them does, and who waits for whom."""

__all__ = [
    "collectives_in_flight",
    "command",
    "crashes",
    "detector",
    "on_rank",
    "report",
    "rules",
    "snapshot",
    "sources",
    "stacks",
]
