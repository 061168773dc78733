"""The browser's part of the dashboard as one ES module, joined from the package's `.js` files.

anywidget takes one module as text. The files are ordinary ES modules that import each other by relative path, so
that they can be read and tested one by one; here their imports and exports of each other are taken out.
"""

from __future__ import annotations

import functools
import importlib.resources
import re

__all__ = ["MODULES", "module_text", "style_text"]

# Every file after those that it imports.
MODULES = (
    "decode.js",
    "store.js",
    "layout.js",
    "theme.js",
    "timeline_paint.js",
    "timeline_view.js",
    "sync_view.js",
    "detail_view.js",
    "toolbar.js",
    "dashboard.js",
)
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[a-z_]+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=const|class|function)", re.MULTILINE)


@functools.cache
def module_text() -> str:
    """Returns the whole module."""
    parts = [_EXPORT.sub("", _IMPORT.sub("", _read(name))) for name in MODULES]
    return "\n".join(parts)


@functools.cache
def style_text() -> str:
    """Returns the style sheet."""
    return _read("dashboard.css")


def _read(name: str) -> str:
    """Returns the text of a file of this package."""
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")
