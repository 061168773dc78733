"""What ranks print and display, as the notebook shows it."""

__all__ = ["board", "display", "logs", "progress", "status_table", "terminal", "throttle"]
