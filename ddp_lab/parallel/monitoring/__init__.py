"""Looking at a model while it trains: its gradients, its replicas, its link."""

__all__ = ["drift", "gradient_norms", "inspection", "link", "monitors"]
