"""A rank's process groups: registered with their sockets, shut down, rebuilt."""

__all__ = ["registry", "rejoin", "script_interrupt"]
