"""Optional features of a model: join, mixed precision, delayed parameters, optimizer in backward, compile."""

__all__ = ["compile", "delayed", "join", "logging_data", "mixed_precision", "optimizer_in_backward"]
