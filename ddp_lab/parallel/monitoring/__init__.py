"""Monitoring of a model while it trains: its gradients, its replicas, its interconnect."""

__all__ = ["drift", "gradient_norms", "inspection", "link", "monitors"]
