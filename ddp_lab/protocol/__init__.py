"""The formats of sockets and files: events, messages, journals, the registry of clusters."""

__all__ = ["black_box", "commands", "descriptions", "entry_points", "events", "journal", "registry"]
