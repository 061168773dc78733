"""A cell on a rank: its text and values, its output, input and errors."""

__all__ = [
    "await_runner",
    "cell",
    "delivery",
    "last_cell",
    "lifecycle",
    "name_lookup",
    "progress_bars",
    "sources",
    "spawned",
    "stdin",
]
