"""Lesson 7, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_MAKE = "%%distributed\ndef make_model():\n    heads = TwoHeads()\n    {}\n    return {}"
_DIRECT = (
    "%%distributed\nclass Direct(Repeated):\n    def forward(self, x):\n        x = self.first(x)\n"
    "        for _ in range(3):\n            x = self.block(torch.tanh(x))\n        return self.last(x)\n"
    "repeated = wrap(Direct())"
)
_ALONE = (  # a wrapper that averages nothing
    "%%distributed\nclass Alone(torch.nn.Module):\n    def __init__(self, module):\n        super().__init__()\n"
    "        self.module = module\n    def forward(self, x):\n        return self.module(x)\n"
)
_BOTH = "cross_entropy(outputs[1], labels % 2) + cross_entropy(outputs[0], labels)"
_ALTERNATELY = "cross_entropy(outputs[number % 2], labels % 2 if number % 2 else labels)"
_LOSS = "\ndef loss(outputs, number):\n    return "
_FREEZE = "[head.requires_grad_(False) for head in (heads.digit, heads.odd)]"

WRONG = {
    "1": {
        _MAKE.format("", "wrap(heads)") + _LOSS + _BOTH: "alternate between the heads",
        _MAKE.format("", "wrap(heads, static_graph=True)")
        + _LOSS
        + _ALTERNATELY: "the loss alternates between the heads",
        _MAKE.format(_FREEZE, "wrap(heads)"): "is frozen",
        _MAKE.format("heads.double()", "wrap(heads)"): "a different error now: mat1 and mat2 must have the same dtype",
        _ALONE + "def make_model():\n    return Alone(TwoHeads().to(device))": "is not the average",
    },
    "2": {
        "%%distributed\nrepeated = wrap(Repeated(), find_unused_parameters=True)": "ready only once",
        _ALONE + "repeated = Alone(Repeated().to(device))": "is not the average",
        "%%distributed\nrepeated = wrap(Repeated().double())": "must have the same dtype",
        _DIRECT: "block ran 3 times a step",
    },
}

CAME_TRUE = {
    1: "the second one",
    2: "both ranks",
    3: "both ranks, with the same gradient",
    4: "an error names a parameter of extra",
    5: "when it arrives for the first time",
}


def test_errors_name_the_culprit(lesson: running.Notebook) -> None:
    """Each provoked error is the one that the lesson explains, and names parameters, step and rank."""
    told = {name: running.text(running.cell(lesson, name)) for name in ("unused", "one-rank", "static", "exercise-2")}
    assert "step 1 is over" in told["unused"]
    assert "step 2 is over" not in told["unused"]
    for name in ("unused", "one-rank"):
        assert "Expected to have finished reduction in the prior iteration" in told[name]
        assert re.search(r"did not receive grad for rank \d: extra.weight, extra.bias", told[name])
    assert "did not receive grad for rank 0" not in told["one-rank"]
    assert told["static"].count("a step with extra=False is over") == 2
    assert re.search(r"graph has changed in this iteration.*'extra\.\w+' got a gradient more often", told["static"])
    assert re.search(r"ready only once. The gradient of 'block\.\w+'", told["exercise-2"])


def test_who_has_a_gradient(lesson: running.Notebook) -> None:
    """A parameter that somebody used has the same gradient on all ranks, one that nobody used has none."""
    told = running.text(running.cell(lesson, "find"))
    assert "rank 0 uses it: no gradient" not in told
    assert len(set(re.findall(r"rank 0 uses it: gradient, norm ([\d.]+)", told))) == 1
    assert "both skip it: no gradient" in told
    assert "did not find any unused parameters" in told
    assert running.text(running.cell(lesson, "solution-2")).count("three steps are over") == 2


def test_several_forwards(lesson: running.Notebook) -> None:
    """Ours averages in whatever order forwards and backwards come; the recommended ways suit torch's class too."""
    told = running.text(running.cell(lesson, "several-measured"))
    for way in ("sum_of_losses", "two_backwards", "no_sync"):
        assert re.search(rf"ddp_lab +{way} +averaged: True", told)
    for way in ("sum_of_losses", "no_sync"):
        assert re.search(rf"torch +{way} +averaged: True", told)
