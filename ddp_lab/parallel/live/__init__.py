"""Actions on a model while it trains: other buckets or hooks, fault injection, pauses.

Their state is `model._live`, which is None until something is requested: a forward then costs one more branch. Requests
come from the training thread, or from the thread that answers the client; they are carried out in the next forward, on
the training thread.
"""

__all__ = ["breakpoints", "change", "fault_injection", "injected", "model"]
