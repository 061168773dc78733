"""The parts of every model of ours: parameters, buckets, buffers, comm hooks, and the agreement between ranks."""

__all__ = [
    "adaptation",
    "agreement",
    "arguments",
    "buckets",
    "buffers",
    "comm_hooks",
    "outputs",
    "parameters",
    "process_groups",
    "step_check",
    "synchronizer",
]
