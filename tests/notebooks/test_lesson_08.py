"""Lesson 8, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import ast
import re

import numpy as np

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_ACCUMULATE = """%%distributed
def accumulate(model, optimizer, pieces):
    optimizer.zero_grad()
    for i, (images, labels) in enumerate(pieces):
        {}
    optimizer.step()
"""
_FORWARD = "loss = loss_of(model(images), labels) / len(pieces)"
_SKIP = "with nullcontext() if i == {} else model.no_sync():\n            {}\n            loss.backward()"

_EPOCH = """%%distributed
def epoch(model, optimizer, pieces, every):
    optimizer.zero_grad()
    for i, (images, labels) in enumerate(pieces):
        last = (i + 1) % every == 0
        with nullcontext() if {} else model.no_sync():
            (loss_of(model(images), labels) / {}).backward()
        if {}:
            optimizer.step()
            {}
    {}
"""
_ZERO = "optimizer.zero_grad()"
_WHOLE = ("last or i == 9", "(4 if i < 8 else 2)", "last or i == 9")

WRONG = {
    "1": {
        _ACCUMULATE.format(_SKIP.format("None", _FORWARD)): "no backward synchronised",
        _ACCUMULATE.format(
            f"{_FORWARD}\n        with model.no_sync():\n            loss.backward()"
        ): "4 of 4 backwards",
        _ACCUMULATE.format(_SKIP.format("3", "loss = loss_of(model(images), labels)")): "4 times too long",
        _ACCUMULATE.format(_SKIP.format("0", _FORWARD)): "Only the *last* backward",
    },
    "2": {
        _EPOCH.format("last", "every", "last", _ZERO, "optimizer.step()"): "the ranks' parameters differ",
        _EPOCH.format("last", "every", "last", _ZERO, "pass"): "have no effect",
        _EPOCH.format("last", "every", "last", _ZERO, "model.sync_gradients(); optimizer.step()"): "half as long",
        _EPOCH.format(*_WHOLE, "pass", "pass"): "not three steps",
        _EPOCH.format("True", *_WHOLE[1:], _ZERO, "pass"): "10 backwards synchronised",
    },
}

CAME_TRUE = {
    2: "the one with large batches",
    3: "it waits until it is interrupted",
    4: "0.5",
}

SHORTER = {"for _ in range(6)]": "for _ in range(2)]"}


def test_what_accumulating_costs(lesson: running.Notebook) -> None:
    """With small batches accumulating does not matter; with large ones 8 added gradients end far above the others."""
    curves = running.figure(running.cell(lesson, "figure-11"))["data"]
    small, large = ([np.mean(curve["y"][-4:]) for curve in curves[first : first + 4]] for first in (0, 4))
    assert max(small) < 1.5 * min(small) < 1.5
    assert large[3] > 5 * large[0]


def test_uneven_inputs(lesson: running.Notebook) -> None:
    """Without join the cell hangs; with it the gradients of the last batches are halved, or whole, or left out."""
    assert "did not end within 3 s" in running.text(running.cell(lesson, "hang"))
    told = running.text(running.cell(lesson, "joined"))
    gradients = [ast.literal_eval(found) for found in re.findall(r"\[[\d., ]+\]", told)]
    assert gradients.count([1.0, 1.0, 1.0, 0.5, 0.5]) == 1
    assert gradients.count([1.0] * 5) == 1
    assert gradients.count([1.0] * 3) in (3, 4)  # equal lines of both ranks are shown once
    assert told.count("RuntimeError") == 2
