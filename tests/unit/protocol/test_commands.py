"""Commands about models that train: the same on both sides of the wire, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp_lab import faults
from ddp_lab.protocol import commands
from ddp_lab.protocol.commands import Change, Look

EACH = [
    commands.CheckChange(Change(bucket_cap_mb=2.0, order=["a", "b"])),
    commands.PrepareChange("x", Change(bucket_cap_mb_list=[1.0, 2.5], comm_hook="fp16")),
    commands.TellChange("x"),
    commands.WithdrawChange("x"),
    commands.PrepareLook("y", Look(gradients=10, check=True)),
    commands.TellLooks(),
    commands.InjectFault(faults.SlowLayer(rank=1, parameter="0.weight", seconds=0.02)),
    commands.SetBreakpoints(["reduced"], [], [0, 2]),
    commands.GoOn("bucket"),
    commands.TellStage(),
    commands.TellFaults(),
    commands.ClearFaults(3),
    commands.HoldTimeouts(),
    commands.Resume(),
]


def test_each_arrives_as_it_was_sent() -> None:
    """Through JSON and beside what else is in the message; none is left out."""
    assert {type(one) for one in EACH} == set(commands.Command.__subclasses__())
    for command in EACH:
        message = {"op": "live", "reducers": {"0": 1}, **commands.to_json(command)}
        assert commands.from_json(json.loads(json.dumps(message))) == command


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({}, "there is no command None: choose one of CheckChange, "),
        ({"do": "Explode"}, "there is no command 'Explode'"),
        ({"do": "TellChange"}, "the command TellChange lacks name"),
        ({"do": "CheckChange", "change": {"caps": 1}}, "the command CheckChange: .*'caps'"),
        ({"do": "InjectFault", "fault": {"kind": "Worse"}}, "there is no fault 'Worse'"),
    ],
)
def test_what_is_none_is_refused(message: dict[str, Any], said: str) -> None:
    """The message names the command and what is wrong with it."""
    with pytest.raises(ValueError, match=said):
        commands.from_json(message)
