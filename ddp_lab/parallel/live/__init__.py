"""What can be done to a model while it trains: other buckets or hooks, faults on purpose, pauses.

All of it hangs on `model._live`, which is None as long as nothing is asked for: a forward then costs one branch more.
Requests come from the thread that trains, or from the thread that answers the client; what they ask for happens in the
next forward, on the thread that trains.
"""

__all__ = ["breakpoints", "change", "fault_injection", "model", "rehearsal"]
