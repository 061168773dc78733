"""The browser's part of a widget as one ES module, joined from the files below `static/`.

anywidget takes one module as text. What Python and the browser have in common is defined in Python, and `generated.js`
is made from it. The other files are ordinary ES modules that import each other by relative path, so that they can be
read and tested one by one. Here each but the last becomes a function that returns its exports, so that other names stay
local to their file; exported names are unique among all files.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import posixpath
import re
from graphlib import TopologicalSorter

from ..analysis.step_metrics import EDGES
from .paint import palette
from .step_feed import BLOCKS
from .views import VIEWS, layout_words

__all__ = ["module_text", "modules_of", "style_text"]

_LOOKS = {role: {"title": title, "colour": palette.COLOURS[role]} for role, title in palette.TITLES.items()}
_GENERATED = {
    "BLOCKS": BLOCKS,
    "COLOURS": palette.COLOURS,
    "EDGE_NAMES": EDGES,
    "BUCKET_WORDS": layout_words(None).as_dict(),
    "PARTS": [
        {
            "name": name,
            "label": palette.LABELS[name],
            "pattern": palette.PATTERNS.get(name),
            "letter": palette.LETTERS.get(name, ""),
            **_LOOKS[name],
        }
        for name in palette.PARTS
    ],
    "RAMP": palette.RAMP,
    "RAMP_ON_DARK": palette.RAMP_ON_DARK,
    "RANK_COLOURS": palette.RANK_COLOURS,
}
_OF_VIEW = ("title", "about", "question", "beside", "steps", "model", "ranks", "groups", "of_step")
_IMPORT = re.compile(r'^import \{[^}]*\} from "([./a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|class|function) (\w+))", re.MULTILINE)


@functools.cache
def modules_of(entry: str) -> tuple[str, ...]:
    """Returns what a module needs, as paths below `static/`: every file after those that it imports, itself last."""
    needs: dict[str, list[str]] = {}
    left = [entry]
    while left:
        path = left.pop()
        if path not in needs:
            folder = posixpath.dirname(path)
            needs[path] = [posixpath.normpath(posixpath.join(folder, name)) for name in _IMPORT.findall(_read(path))]
            left += needs[path]
    return tuple(TopologicalSorter(needs).static_order())


@functools.cache
def module_text(entry: str) -> str:
    """Returns a module and everything it imports as one module, which exports what the module exports."""
    *parts, last = [_IMPORT.sub("", _read(path)) for path in modules_of(entry)]
    return "\n".join([*(_scoped(part) for part in parts), last])


def _scoped(text: str) -> str:
    """Returns a file as a function that is called once; its exports are names of the whole module."""
    names = ", ".join(_EXPORT.findall(text))
    return f"const {{ {names} }} = (() => {{\n{_EXPORT.sub('', text)}\nreturn {{ {names} }};\n}})();"


@functools.cache
def style_text(*names: str) -> str:
    """Returns these style sheets as one, with the palette's colours as properties."""
    colours = "".join(f" --ddp-role-{role}: {colour};" for role, colour in palette.COLOURS.items())
    roots = f":is(.ddp-lab, .ddp-cluster) {{{colours} }}"
    return "\n".join([roots, *(_read(f"styles/{name}.css") for name in names)])


def _read(path: str) -> str:
    """Returns the text of a file below `static/`; `generated.js` is made here."""
    if path == "generated.js":
        views = {name: {field: getattr(view, field) for field in _OF_VIEW} for name, view in VIEWS.items()}
        made = {**_GENERATED, "VIEWS": views}
        return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in made.items())
    return (importlib.resources.files(__package__) / "static" / path).read_text(encoding="utf-8")
