"""What a view shows, without a browser: its numbers, its picture as SVG, its figure for plotly."""

__all__ = [
    "gradients",
    "model_map",
    "paint",
    "pictures",
    "scene",
    "scenes",
    "step_frames",
    "timeline_scene",
    "view_data",
]
