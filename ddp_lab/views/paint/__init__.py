"""Painting scenes, as SVG and as plotly figures, in the one palette."""
