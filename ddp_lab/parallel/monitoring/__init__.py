"""Monitoring of a model while it trains: its gradients, its replicas, its interconnect."""

__all__ = [
    "accumulation",
    "activity",
    "drift",
    "gradient_norms",
    "group_collectives",
    "inspection",
    "link",
    "memory",
    "monitors",
]
