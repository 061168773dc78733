"""The browser's part of the dashboard as one ES module, joined from the package's `.js` files.

anywidget takes one module as text. The files are ordinary ES modules that import each other by relative path, so
that they can be read and tested one by one. Here each but the last becomes a function that returns what it exports, so
that names that a file keeps to itself stay its own.
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
    "tip.js",
    "chart_canvas.js",
    "tables.js",
    "tabs.js",
    "marks.js",
    "many_steps.js",
    "timeline_paint.js",
    "timeline_pointer.js",
    "timeline_view.js",
    "heat.js",
    "sync_view.js",
    "gradient_dots.js",
    "detail_view.js",
    "overlap.js",
    "overlap_view.js",
    "stragglers.js",
    "stragglers_view.js",
    "model_map.js",
    "buckets_view.js",
    "findings_view.js",
    "overhead.js",
    "toolbar.js",
    "panels.js",
    "dashboard.js",
)
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[a-z_]+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|class|function) (\w+))", re.MULTILINE)


@functools.cache
def module_text() -> str:
    """Returns the whole module."""
    *parts, last = [_IMPORT.sub("", _read(name)) for name in MODULES]
    return "\n".join([*(_scoped(part) for part in parts), last])


def _scoped(text: str) -> str:
    """Returns a file as a function that is called once; its exports are names of the whole module."""
    names = ", ".join(_EXPORT.findall(text))
    return f"const {{ {names} }} = (() => {{\n{_EXPORT.sub('', text)}\nreturn {{ {names} }};\n}})();"


@functools.cache
def style_text() -> str:
    """Returns the style sheet."""
    return _read("dashboard.css")


def _read(name: str) -> str:
    """Returns the text of a file of this package."""
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")
