"""`ddp-lab`: the commands."""

__all__ = ["main"]
