"""Painting pictures: axes, bars and lines as SVG, and the one palette."""
