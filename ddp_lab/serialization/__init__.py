"""Transfer of objects between processes: by value, in parcels, through shared memory."""

__all__ = ["functions", "parcels", "shared_memory", "unpicklable"]
