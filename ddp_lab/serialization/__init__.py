"""Objects on their way between processes: by value, in parcels, through shared memory."""

__all__ = ["functions", "parcels", "shared_memory", "unpicklable"]
