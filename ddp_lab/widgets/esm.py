"""The browser's part of a widget as one ES module, joined from the package's `.js` files.

anywidget takes one module as text. The files are ordinary ES modules that import each other by relative path, so
that they can be read and tested one by one. Here each but the last becomes a function that returns what it exports, so
that names that a file keeps to itself stay its own.
"""

from __future__ import annotations

import functools
import importlib.resources
import re

__all__ = ["BACKGROUND_MODULES", "CLUSTER_MODULES", "MODULES", "module_text", "style_text"]

# Of the dashboard: every file after those that it imports.
MODULES = (
    "decode.js",
    "store.js",
    "layout.js",
    "theme.js",
    "life.js",
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
    "control_status.js",
    "before_after.js",
    "reconfigure_form.js",
    "buckets_view.js",
    "state_machine.js",
    "step_through_view.js",
    "rehearsal_view.js",
    "alarm.js",
    "findings_view.js",
    "collective_player.js",
    "collective_picture.js",
    "collectives_view.js",
    "gradient_chart.js",
    "gradients_view.js",
    "overhead.js",
    "presence.js",
    "kernel_facts.js",
    "hide_picture.js",
    "incoming.js",
    "toolbar.js",
    "what_if_sliders.js",
    "what_if_view.js",
    "panels.js",
    "player_bar.js",
    "dashboard.js",
)
# Of the cluster's panel.
CLUSTER_MODULES = (
    "theme.js",
    "tables.js",
    "control_status.js",
    "presence.js",
    "life.js",
    "hide_picture.js",
    "cluster_table.js",
    "cluster_panel.js",
)
# Of a cell in the background.
BACKGROUND_MODULES = ("theme.js", "hide_picture.js", "life.js", "background_cell.js")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[a-z_]+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|class|function) (\w+))", re.MULTILINE)


@functools.cache
def module_text(modules: tuple[str, ...] = MODULES) -> str:
    """Returns the whole module, which exports what the last of these files does."""
    *parts, last = [_IMPORT.sub("", _read(name)) for name in modules]
    return "\n".join([*(_scoped(part) for part in parts), last])


def _scoped(text: str) -> str:
    """Returns a file as a function that is called once; its exports are names of the whole module."""
    names = ", ".join(_EXPORT.findall(text))
    return f"const {{ {names} }} = (() => {{\n{_EXPORT.sub('', text)}\nreturn {{ {names} }};\n}})();"


@functools.cache
def style_text(*sheets: str) -> str:
    """Returns the style sheet; of these files, none: the dashboard's."""
    return "\n".join(_read(name) for name in sheets or ("dashboard.css",))


def _read(name: str) -> str:
    """Returns the text of a file of this package."""
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")
