"""A timeline as one HTML page."""
