"""Views of a timeline in the notebook. No lower layer imports this package."""

__all__ = ["background_cell", "cluster_panel", "collectives", "controls", "dashboard", "output_views"]
