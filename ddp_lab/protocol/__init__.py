"""What crosses a socket or stands in a file: events, messages, journals, archives, parcels, registry of clusters."""

__all__ = [
    "archive",
    "black_box",
    "descriptions",
    "entry_points",
    "events",
    "functions",
    "journal",
    "messages",
    "parcels",
    "registry",
    "shared_memory",
    "unpicklable",
]
