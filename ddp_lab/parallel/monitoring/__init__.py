"""Looking at a model while it trains: its gradients, its replicas, its link."""
