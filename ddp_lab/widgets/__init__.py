"""Views of a timeline in the notebook; nothing below this package knows that it exists."""

__all__ = ["background_cell", "cluster_panel", "controls", "dashboard", "view_widgets"]
