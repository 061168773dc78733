"""A rank's reports on itself: where it is, what it has launched, what it uses."""

__all__ = ["debug_server", "examine", "flights", "gpu", "script"]
