"""What is reached by its name alone is there, and is named in one place."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from ddp_lab.protocol import entry_points
from ddp_lab.protocol.entry_points import RankFunction

PACKAGE = Path(entry_points.__file__).parents[1]
NAMED = {name: getattr(entry_points, name) for name in entry_points.__all__ if name.isupper()}
# For users' own code, which imports it by this name.
_OTHERS = {"ddp_lab.rank_names", "ddp_lab.recording", "ddp_lab.follow", "ddp_lab.compare"}


@pytest.mark.parametrize("name", NAMED)
def test_it_is_there(name: str) -> None:
    """Each function can be imported as ranks import it, each module that is started has a main part."""
    found = NAMED[name]
    if isinstance(found, RankFunction):
        assert callable(eval(found.expression, {}))
        return
    assert importlib.import_module(found)
    if name not in ("RANK", "WORKER", "CLUSTER", "ASSISTANTS"):
        source = PACKAGE.parent.joinpath(*found.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        assert 'if __name__ == "__main__":' in source


def test_names_stand_in_one_place() -> None:
    """No other module names a module of ours as text, but in what a reader reads."""
    elsewhere = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        read = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in read:
                names = re.findall(r"^ddp_lab(?:\.\w+)+$|(?<=__import__\(')ddp_lab[\w.]+", node.value)
                elsewhere += [(path.stem, name) for name in names if name not in _OTHERS]
    assert [one for one in elsewhere if one[0] != "entry_points"] == []
