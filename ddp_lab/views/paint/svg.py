"""What every picture has: patterns of fills, and the sheet that says why there is nothing to draw."""

from __future__ import annotations

from xml.sax.saxutils import escape

from .palette import COLOURS

__all__ = ["PATTERNS_SVG", "empty_svg"]

PATTERNS_SVG = (
    "<defs><pattern id='hatch' width='6' height='6' patternUnits='userSpaceOnUse'>"
    f"<rect width='6' height='6' fill='{COLOURS['waiting']}'/><path d='M-1 7L7 -1M-1 1L1 -1M5 7L7 5' stroke='#000' "
    "stroke-opacity='.6'/></pattern><pattern id='dots' width='6' height='6' patternUnits='userSpaceOnUse'>"
    f"<rect width='6' height='6' fill='{COLOURS['queued']}'/>"
    "<path d='M1 1h1.3v1.3h-1.3zM4 4h1.3v1.3h-1.3z' fill-opacity='.6'/></pattern></defs>"
)


def empty_svg(text: str, width: int = 860) -> str:
    """Returns a picture that only states `text`, on a white sheet, which reads on light and dark pages alike."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='44' viewBox='0 0 {width} 44' "
        "font-family='system-ui,-apple-system,Segoe UI,sans-serif'>"
        "<rect width='100%' height='100%' rx='4' fill='#fff'/>"
        f"<text x='14' y='27' font-size='13' fill='#222'>{escape(text)}</text></svg>"
    )
