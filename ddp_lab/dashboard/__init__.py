"""A timeline as it is looked at: in the notebook, as pictures, as a page. No lower layer imports this package."""

__all__ = [
    "background_cell",
    "cluster_panel",
    "collectives",
    "controls",
    "dashboard",
    "output_views",
    "paint",
    "report",
    "scene",
    "views",
]
