"""What crosses a socket or stands in a file: events, messages, journals, parcels, the registry of clusters."""

__all__ = [
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
