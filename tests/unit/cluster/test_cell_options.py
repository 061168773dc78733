"""Whose the keyword arguments of `Cluster.run` are: the function's, or the text's."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from ddp_lab.cluster.cells.run import CellOptions


def trains(steps: int, timeout: float = 1.0) -> float:
    """A function of the user's with a parameter that `Cluster.run` has too."""
    return steps * timeout


def test_a_function_gets_every_keyword() -> None:
    """None of the names that a text's cell has as options is taken from a function."""
    named: dict[str, Any] = {"label": 1, "board": 2, "view": 3, "tick": 4, "code": 5, "self": 6, "name": 7}
    options = CellOptions.of(lambda **given: given, (8,), named, ["ranks", "wait", "timeout"])
    assert (options.args, options.kwargs) == ((8,), named)
    assert (options.label, options.board, options.view, options.tick) == (None, None, None, None)


def test_a_texts_keywords_are_options() -> None:
    """They are the cell's, and one that there is not is named."""
    assert CellOptions.of("1", (), {"label": "first"}, []).label == "first"
    with pytest.raises(TypeError, match="a cell's text has no argument 'lable': choose from label, board, view, tick"):
        CellOptions.of("1", (), {"lable": "first"}, [])


def test_a_name_that_both_have() -> None:
    """It is refused where it was given, with what to do; not if the function's is fixed, or not asked for."""
    said = r"timeout= is both an argument of lab.run and a parameter of the function: .*functools.partial or a lambda"
    with pytest.raises(TypeError, match=said):
        CellOptions.of(trains, (3,), {}, ["timeout"])
    assert CellOptions.of(trains, (3,), {}, ["ranks", "wait"]).args == (3,)
    for fixed in (functools.partial(trains, timeout=2.0), lambda steps: trains(steps, timeout=2.0), print, 3):
        assert CellOptions.of(fixed, (3,), {}, ["timeout"]).args == (3,)
