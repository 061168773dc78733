"""The picture of a widget that a saved notebook keeps, for readers without a kernel.

[Note: two outputs] A notebook file holds what was displayed, not what the browser shows. JupyterLab shows only the live
view of an output that has one, and "model not found" without its kernel; it never shows an SVG in the same output. So a
dashboard is displayed as two outputs: the live view, and below it a picture. While a live view is on the page, its
script hides the picture with a style rule. In a notebook that is reopened without a kernel there is no such rule: the
picture is visible, and its own style hides the error message of the live view. Viewers without widgets show only the
picture. The picture is replaced at the end of each cell.
"""

from __future__ import annotations

import base64
import html
import uuid
from typing import Any

import IPython.display

__all__ = ["SavedPicture", "SavedTable"]


class SavedPicture:
    """Shows a picture below a live view, and replaces it wherever it was shown."""

    def __init__(self, token: str) -> None:
        """`token` marks the picture's HTML, so that the live view's script can hide it."""
        self._token = token
        self._handles: list[Any] = []

    def display(self, picture: str, summary: str) -> None:
        """Displays the picture below the last output."""
        make: Any = IPython.display.DisplayHandle
        handle = make(uuid.uuid4().hex)
        self._handles.append(handle)
        handle.display(self.bundle(picture, summary), raw=True)

    def replace(self, picture: str, summary: str) -> None:
        """Replaces the picture in every output where it was displayed."""
        for handle in self._handles:
            handle.update(self.bundle(picture, summary), raw=True)

    def bundle(self, picture: str, summary: str) -> dict[str, str]:
        """Returns the picture's mime bundle: HTML, and the summary as text."""
        name = f"ddp-lab-static-{self._token}"
        alone = (
            f"body:not(.ddp-lab-live-{self._token}) .jp-OutputArea-child:has(+ .jp-OutputArea-child .{name})"
            " { display: none; }"
        )
        # As a link: viewers without styles, like an exported Markdown file, would show them as text.
        style = f"data:text/css;base64,{base64.b64encode(alone.encode()).decode()}"
        link = f'<link rel="stylesheet" href="{style}">'
        markup = f'<div class="{name}">{link}{self._markup(picture, summary)}</div>'
        return {"text/html": markup, "text/plain": summary}

    def _markup(self, picture: str, summary: str) -> str:
        """Returns the HTML of the picture, an SVG."""
        data = base64.b64encode(picture.encode()).decode()
        alt = html.escape(summary, quote=True)
        return f'<img style="max-width: 100%" alt="{alt}" src="data:image/svg+xml;base64,{data}">'


class SavedTable(SavedPicture):
    """A `SavedPicture` with HTML instead of a picture."""

    def _markup(self, picture: str, summary: str) -> str:
        return picture
