"""`ddp-lab run`: any DDP script under torch's elastic agent, recorded."""

__all__ = ["reports", "tune"]
