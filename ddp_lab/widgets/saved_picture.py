"""The picture that a notebook keeps of a widget, for readers without a kernel.

[Note: two outputs] A notebook file holds what was displayed, not what the browser shows. Of an output with a live
view JupyterLab shows that view alone, and without the kernel that made it only "model not found": an SVG in the same
output is never seen there. So a dashboard is displayed as two outputs: the live view, and below it a picture. As
long as a live view is on the page its script hides the picture by a style rule of the page; reopened without a
kernel there is no such rule: the picture is seen, and its own style hides the live view's error message. Viewers that
know no widgets show the picture alone. The picture is replaced at the end of each cell.
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
        """`token` marks the picture's HTML; the live view's script hides what bears it."""
        self._token = token
        self._handles: list[Any] = []

    def display(self, picture: str, summary: str) -> None:
        """Displays it below what was displayed last."""
        make: Any = IPython.display.DisplayHandle
        handle = make(uuid.uuid4().hex)
        self._handles.append(handle)
        handle.display(self.bundle(picture, summary), raw=True)

    def replace(self, picture: str, summary: str) -> None:
        """Replaces it in every output where it was displayed."""
        for handle in self._handles:
            handle.update(self.bundle(picture, summary), raw=True)

    def bundle(self, picture: str, summary: str) -> dict[str, str]:
        """Returns the picture's mime bundle: HTML, and the summary as text."""
        name = f"ddp-lab-static-{self._token}"
        alone = (
            f"body:not(.ddp-lab-live-{self._token}) .jp-OutputArea-child:has(+ .jp-OutputArea-child .{name})"
            " { display: none; }"
        )
        # As a link: what shows no styles, like an exported Markdown file, would show them as text.
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
    """The same with HTML instead of a picture."""

    def _markup(self, picture: str, summary: str) -> str:
        return picture
