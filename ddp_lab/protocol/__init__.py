"""What crosses a socket or stands in a file: events, messages, journals, the registry of clusters."""

__all__ = ["commands", "descriptions", "entry_points", "events", "journal", "registry"]
