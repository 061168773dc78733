"""Painting scenes, as SVG and as plotly figures, in the one palette."""

__all__ = ["figure", "palette", "scene_json", "scene_svg"]
