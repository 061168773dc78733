"""The views, one object in one file each; `catalogue` lists them."""

__all__ = [
    "buckets",
    "catalogue",
    "collectives",
    "layout_words",
    "model_map",
    "overlap",
    "step_frames",
    "stragglers",
    "view",
]
