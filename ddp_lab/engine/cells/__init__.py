"""A cell on a rank: its text and values, what it prints, asks for and raises."""

__all__ = [
    "await_runner",
    "cell",
    "last_cell",
    "name_lookup",
    "progress_bars",
    "sources",
    "spawned",
    "stdin",
    "tracebacks",
]
