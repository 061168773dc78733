"""Lesson 14, run on real ranks: its three faults are found, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

import pytest

from ddp_lab.analysis.comparison import Difference
from ddp_lab.timeline.comparison import Comparison
from tutorials.checks import lesson_14

from . import running
from .lesson_tests import test_checks as test_checks

_1 = 'late_rank, where, cause = {}, "{}", "{}"'
_LOADER = """%%distributed
class Batches:
    def __init__(self, disk, rank, size=8, length=48):
        self.draw = torch.Generator().manual_seed(rank)
        {}

    def next(self):
        {}
        pieces = self.tokens[self.starts[:{}] + torch.arange(49)]
        return pieces[:, :-1], pieces[:, 1:]
"""
_READ, _DRAW = "self.tokens = encode(disk.read({}))", "self.starts = torch.randint({}, (8, 1), generator=self.draw)"
_OWN, _USUAL = _READ.format("rank"), _DRAW.format("len(self.tokens) - 48")
_3 = 'fix, limit_mb = "{}", {}'
_4 = """%%distributed
unused = {}
def make_network():
    network = SmallGPT()
    {}
    return {}
options["find_unused_parameters"] = {}
"""
_NAMES, _FROZEN = ["word_head.weight", "word_head.bias"], "network.word_head.requires_grad_(False)"
_FASTER = 'speed_up = step_ms["as found"] / step_ms["no unused head"]\n'
_SAVED = """times = list(step_ms.values())
saved = {name: times[i] - times[i + 1] for i, name in enumerate(["loader", "buckets", "head"])}
largest = min(saved, key=saved.get)
"""

WRONG = {
    "1": {
        _1.format(1, "in the loader", "batch"): "one of places",
        _1.format(0, "before its backward", "batch"): "it is not rank 0",
        _1.format(1, "in its whole backward", "batch"): "it is not late in its whole backward",
        _1.format(1, "before its backward", "forward"): "forward takes about as long",
    },
    "2": {
        _LOADER.format("self.disk = disk", f"{_OWN.replace('disk', 'self.disk')}; {_USUAL}", 8): "still read when",
        _LOADER.format(_OWN, _USUAL, 4): "of shape (8, 48)",
        _LOADER.format(f"{_OWN}; {_USUAL}", "pass", 8): "every batch is the same",
        _LOADER.format(_READ.format("1 - rank"), _USUAL, 8): "have changed",
        _LOADER.format(_OWN, _DRAW.format("48"), 8): "have changed",
    },
    "3": {
        _3.format("smaller batches", 1): "one of the three changes",
        _3.format("half the bytes", 0.0001): "Which cost is larger",
        _3.format("every second step", 0.0001): "Which cost is larger",
        _3.format("larger buckets", 0): "a positive number",
        _3.format("larger buckets", 0.0001): "there are still 56 collectives",
    },
    "4": {
        _4.format(_NAMES[:1], _FROZEN, "network", False): "the full names of the two parameters",
        _4.format(_NAMES, _FROZEN, "None", False): "should return the network",
        _4.format(_NAMES, "network.requires_grad_(False)", "network", False): "no longer learns",
        _4.format(_NAMES, "pass", "network", False): "still requires gradients",
        _4.format(_NAMES, _FROZEN, "network", True): "What is find_unused_parameters=True good for now",
    },
    "5": {
        'speed_up, largest = "twice", "buckets"': "should be a number",
        'speed_up, largest = step_ms["no unused head"] / step_ms["as found"], "buckets"': "upside down",
        'speed_up, largest = step_ms["as found"] - step_ms["no unused head"], "buckets"': "divide the first",
        f'{_FASTER}largest = "disk"': "should be",
        _FASTER + _SAVED: "Compare the differences",
    },
}

_DISK = "disk, network = Disk(), Network()"
SHORTER = {
    "seconds=120": "seconds=8",
    "train(24)": "train(20)",
    _DISK: f"from checks import training_parts; training_parts.SLOW_MS = 300\n{_DISK}",
}


def test_the_faults_are_found(lesson: running.Notebook) -> None:
    """The late rank in the first run, the tiny buckets in the second, the unused head in the third.

    Without `find_unused_parameters` the head makes the second step fail. (That tune finds larger buckets is tested with
    a delay that is large enough on a busy machine, in `tests/cluster/test_tune.py`.)
    """
    summary = running.text(running.cell(lesson, "summary"))
    assert "56 buckets" in summary
    assert "Rank 1 starts its backward late" in summary
    assert "The buckets are too small" in running.text(running.cell(lesson, "what-if"))
    last = running.text(running.cell(lesson, "tune"))
    assert "2 parameters never got a gradient. word_head.weight, word_head.bias" in last
    assert re.search(r"is faster than .* by [\d.]+ % of the step|no setting was clearly faster", last)
    assert "step 2: Expected to have finished reduction" in running.text(running.cell(lesson, "option"))


def test_the_fixes_help(lesson: running.Notebook) -> None:
    """In the end the training is clearly faster, with the same loss, and the report says both.

    What each fix gained is measured on a machine that may be busy; what is said of it is tested with given times.
    """
    result = running.text(running.cell(lesson, "result"))
    assert "no unused head is faster than as found" in result
    assert re.search("What happened: by (all|half) of that", running.text(running.tagged(lesson, "compare-2")))
    [report] = [output.data["text/markdown"] for output in running.cell(lesson, "report").outputs]
    losses = re.findall(r"loss (\d\.\d{4})", result)
    assert len(losses) == 4
    assert float(losses[-1]) == pytest.approx(float(losses[0]), rel=0.01)
    assert f"steps is {losses[-1]}; it was {losses[0]}" in report
    assert len(re.findall(r"\| \d+ % \| -?\d+ % \|", report)) == 3


@pytest.mark.parametrize(
    ("after_ms", "words"),
    [
        (1100 - 900, "by all of that"),
        (1100 - 450, "by half of that: one of two ranks is faster"),
        (50, "by more: it takes 50 ms again, as last week"),
    ],
)
def test_what_happened_to_the_step(after_ms: float, words: str) -> None:
    """Of a step of 1,100 ms, after the 900 ms of the slow disk are gone."""
    step = Difference("phase", "step", None, None, 1100, after_ms, 0, 0, 0, 0)
    assert lesson_14.shorter_step(Comparison("as found", "read once", [step], [], (24, 24))) == words
