"""Appendix A, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_BY_HAND = "%%distributed --ranks 0\ndef forward_by_hand(model, x):\n"
_SCATTER = "    pieces, keywords = model.scatter((x,), {}, model.device_ids)\n"
_REPLICATE = "    replicas = model.replicate(model.module, model.device_ids)\n"
_APPLY = "    outputs = model.parallel_apply(replicas, pieces, keywords)\n"
_GATHER = "    return model.gather(outputs, model.output_device)"

WRONG = {
    "1": {
        _BY_HAND
        + _SCATTER
        + _REPLICATE
        + "    outputs = [replica(*piece) for replica, piece in zip(replicas, pieces)]\n"
        + _GATHER: "one after the other",
        _BY_HAND + "    return model(x)": "use its four methods instead of its forward",
        _BY_HAND + _SCATTER + "    replicas = [model.module] * 2\n" + _APPLY + _GATHER: "replicate it",
        _BY_HAND + _SCATTER + _REPLICATE + _APPLY + "    return outputs": "a list of 2",
        _BY_HAND + _SCATTER + "    pieces = [(x,), (x,)]\n" + _REPLICATE + _APPLY + _GATHER: "512 outputs for 256",
        _BY_HAND + _SCATTER + "    pieces = pieces[::-1]\n" + _REPLICATE + _APPLY + _GATHER: "in their order",
    },
}

CAME_TRUE = {
    1: "in the original network",
    2: "0",
}


def test_the_four_steps(lesson: running.Notebook) -> None:
    """Parts of a batch, copies that autograd made, and five kinds of bars in the picture."""
    told = running.text(running.cell(lesson, "replicate"))
    assert "2 parts of 128 images" in told
    assert "the weight on cpu:1 was made by BroadcastBackward" in told
    assert "the original's gradient: [1.0]" in told
    assert "images counted: 0" in running.text(running.cell(lesson, "counting"))
    assert len(running.figure(running.cell(lesson, "drawn"))["data"]) == 5


def test_compared_with_two_ranks(lesson: running.Notebook) -> None:
    """One process, DataParallel and DDP compute the same gradients, and each is drawn for both networks."""
    told = running.text(running.cell(lesson, "compare"))
    assert told.count("the same gradients in all three ways: True") == 2
    bars = running.figure(running.cell(lesson, "compare-seen"))["data"]
    assert [(bar["name"], len(bar["x"])) for bar in bars] == [("forward", 3), ("backward", 3)] * 2
