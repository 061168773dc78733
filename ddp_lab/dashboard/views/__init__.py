"""The content of the views without a browser: their numbers, SVG pictures and plotly figures."""

__all__ = [
    "catalogue",
    "gradients",
    "groups",
    "layout_words",
    "model_map",
    "overview",
    "parameter_groups",
    "pictures",
    "scenes",
    "step_frames",
    "timeline_scene",
    "view_data",
]
