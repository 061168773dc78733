"""Lesson 4, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

from . import running
from .judging import judge

_BY_HAND = "%%distributed --ranks 0\ndef forward_by_hand(model, x):\n"
_SCATTER = "    pieces, keywords = model.scatter((x,), {}, model.device_ids)\n"
_REPLICATE = "    replicas = model.replicate(model.module, model.device_ids)\n"
_APPLY = "    outputs = model.parallel_apply(replicas, pieces, keywords)\n"
_GATHER = "    return model.gather(outputs, model.output_device)"
_COUNTING = (
    "%%distributed --ranks 0\nclass Counting(torch.nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.Linear(64, 10)\n        {}\n"
    "    def forward(self, x):\n        {}\n        return self.layer(x)\n"
    "    def total(self):\n        return {}"
)

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
    "2": {
        _COUNTING.format(
            "self.register_buffer('seen', torch.zeros(1))", "self.seen += len(x)", "self.seen"
        ): "only its part was counted",
        _COUNTING.format("self.seen = []", "self.seen.append(1)", "sum(self.seen)"): "counted by exactly one replica",
    },
}


def test_checks(lesson: running.Notebook) -> None:
    """A check says "Not yet" to the untouched exercise, names what is wrong with an answer, accepts the solution."""
    judge(lesson, WRONG)


def test_the_four_steps(lesson: running.Notebook) -> None:
    """Pieces of a batch, copies that autograd made, a thread for each replica, and the error of one of them."""
    told = {name: running.text(running.cell(lesson, name)) for name in ("scatter", "replicate", "apply")}
    assert "cpu:0: ['4 rows', 'a word'], labels: 4 rows" in told["scatter"]
    assert "a batch of 1: 1 piece" in told["scatter"]
    assert "cpu:0: the original's memory; made by BroadcastBackward; 0 parameters of its own" in told["replicate"]
    assert "cpu:1: memory of its own" in told["replicate"]
    assert "the original's gradient: [1.0]" in told["replicate"]
    assert "forward ran in ['replica-0', 'replica-1']" in told["apply"]
    assert "gathered: [256, 10]" in told["apply"]
    assert "Caught ValueError in replica 1 on device cpu:1." in told["apply"]
    assert len(running.figure(running.cell(lesson, "picture"))["data"]) == 5


def test_compared_with_two_ranks(lesson: running.Notebook) -> None:
    """One process, DataParallel and DDP compute the same gradients, and each is drawn for both networks."""
    told = running.text(running.cell(lesson, "compare"))
    assert told.count("the same gradients in all three ways: True") == 2
    bars = running.figure(running.cell(lesson, "compare-seen"))["data"]
    assert [(bar["name"], len(bar["x"])) for bar in bars] == [("forward", 3), ("backward", 3)] * 2
    assert running.text(running.cell(lesson, "gil")).count(" times") == 3
