"""`ddp-lab doctor`: why a job makes no progress that was started without us, from what torch and py-spy say of it."""

__all__ = ["command"]
