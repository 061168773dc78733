"""A timeline as one HTML page."""

__all__: list[str] = []
