"""Messages between client and ranks: the same on both sides of the wire, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab import faults
from ddp_lab.protocol import messages
from ddp_lab.protocol.entry_points import CALL
from ddp_lab.protocol.messages import Change, Message, MonitoringRequest, decode, encode, plain, read

EACH: list[Message] = [
    messages.Cell("1-2", "cell 2", messages.CellText("x = 1", 2, "", "# above"), after={"1-1": "cell 1"}),
    messages.Cell("1-3", "cell 3", function=CALL, sources={"<cell 1>": "def f(): ..."}, frames=(b"called", b"\x00")),
    messages.Call("call-1", CALL, (b"called",)),
    messages.CommMessage("comm_msg", {"comm_id": "1", "data": [1, None]}, {}, (b"buffer",)),
    messages.InputAnswer(3, "yes"),
    messages.Interrupt(("1-2", "1-3")),
    messages.Unblock(1, None),
    messages.PeerFailed("1-2", 1, {"0": 12}),
    messages.Settle("1-2"),
    messages.Ping(stack=True),
    messages.GetHealth(),
    messages.Examine(whole=False),
    messages.FindCallSite("0", 18),
    messages.GetTime(),
    messages.DescribeRank(),
    messages.GetLastCell(),
    messages.Complete("model.la"),
    messages.LookUp("model", source=True),
    messages.OpenDebugger("debug-1", "/tmp/"),
    messages.DebugRequest("debug-1", 4, {"command": "stackTrace", "arguments": {"threadId": 1}}),
    messages.HoldDebugTimeouts(on=True),
    messages.GetDebugger("debug-1"),
    messages.CloseDebugger("debug-1"),
    messages.InspectGradients(0, 12),
    messages.MeasureEventCost(),
    messages.CheckChange(Change(bucket_cap_mb=2.0, order=("a", "b")), reducers={0: 1, 1: 2}),
    messages.PrepareChange("x", Change(bucket_cap_mb_list=(1.0, 2.5), comm_hook="fp16"), reducers={0: 1}),
    messages.GetChange("x"),
    messages.WithdrawChange("x"),
    messages.PrepareMonitoring("y", MonitoringRequest(gradients=10, check=True)),
    messages.GetMonitoring(),
    messages.InjectFault(faults.SlowLayer(rank=1, parameter="0.weight", seconds=0.02)),
    messages.SetBreakpoints(("reduced",), (), (0, 2)),
    messages.Continue("bucket"),
    messages.GetStage(),
    messages.GetFaults(),
    messages.ClearFaults(3),
    messages.HoldTimeouts(),
    messages.Resume(),
]
KINDS = sorted({type(one).__name__ for one in EACH})


def test_each_arrives_as_it_was_sent() -> None:
    """Through its frames, with the number of a request; none is left out."""
    ours = {name for name, kind in messages._KINDS.items() if kind.__module__ == messages.__name__}
    assert set(KINDS) == ours
    for number, message in enumerate(EACH):
        assert decode(encode(message, number)) == (message, number)
        assert decode(encode(message)) == (message, None)


def test_replies_arrive_as_they_were_sent() -> None:
    """Also those with records in records, with a rank's number for a key, and with pairs."""
    stage = messages.BucketStage("ready", 2, 3, ("0.bias",))
    for reply in (
        messages.Status("idle", ended=("1-2", True), entered={"0": 4}, whole=False),
        messages.Settled(True, None, {"0": 4}, 1),
        messages.Health("running", "1-2", stack=("f",), seconds=1, gpu=messages.GpuUse(1, None, 3)),
        messages.InFlight(1, messages.OldestFlight("all_reduce", 1, 4, 0.5, "")),
        messages.RankDescription(messages.LastCell("1-2", "cell", 1.5), "text", 2.5),
        messages.Completions((("weight", "instance"),)),
        messages.Page(),
        messages.Stage(1, 2, True, False, messages.Pause("reduced", 5, bucket=0), True, "", (stage,)),
    ):
        assert read(type(reply), json.loads(json.dumps(plain(reply)))) == reply


def test_reports_arrive_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large value is cut into frames that the client takes; a failure around the cell has none."""
    monkeypatch.setattr(messages, "_PIECE", 3)
    done = messages.CellReport(True, "bytes", b"12345678")
    assert [len(frame) for frame in messages.report_frames(done)[1:]] == [3, 3, 2]
    failed = messages.CellReport(False, name="ValueError", traceback=("a", "b"), brief=("a",), time_ns=7)
    for report in (done, failed, messages.RequestFailure("MemoryError", "none left", "")):
        assert messages.report_of(messages.report_frames(report)) == report


@pytest.mark.parametrize(
    ("op", "fields", "said"),
    [
        ("Explode", {}, "there is no message 'Explode'"),
        ("GetChange", {"reducers": {}}, "GetChange lacks name"),
        ("GetChange", {"name": 1}, "GetChange.name is 1, not str"),
        ("GetChange", {"name": "x", "reducers": {"a": 1}}, "GetChange.reducers has the key 'a', not a number"),
        ("GetChange", [], r"GetChange is \[\], not an object"),
        ("CheckChange", {"change": {"caps": 1}}, "Change has no 'caps'"),
        ("CheckChange", {"change": {"order": 1}}, "Change.order is 1, not str"),
        ("InjectFault", {"fault": {"kind": "Worse"}}, "there is no fault 'Worse'"),
        ("InjectFault", {"fault": {"kind": "SlowRank", "feet": 2}}, "InjectFault.fault: .*'feet'"),
        ("Ping", {"stack": 1}, "Ping.stack is 1, not bool"),
        ("Ping", {"again": True}, "Ping has no 'again'"),
        ("Interrupt", {"cells": "1-2"}, "Interrupt.cells is '1-2', not Sequence"),
    ],
)
def test_what_is_none_is_refused(op: str, fields: Any, said: str) -> None:
    """The error names the message, its field and what is wrong with it; the number of the request is known."""
    error, number = decode([json.dumps({"op": op, "id": 3, "fields": fields}).encode()])
    assert number == 3
    with pytest.raises(ValueError, match=said):
        raise error  # type: ignore[misc]


def test_data_of_a_message_that_has_none() -> None:
    """Frames behind a message without data are an error; so is what is not even an envelope."""
    error, _ = decode([*encode(messages.Ping()), b"more"])
    assert str(error) == "the message Ping has no data, and came with 1 frames"
    for frame in (b"", b"[]", b'{"op": 1}', b'{"op": "Ping", "id": "x"}'):
        with pytest.raises(ValueError, match=r"."):
            decode([frame])


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(EACH), st.data())
def test_whatever_a_field_holds(message: Message, data: st.DataObject) -> None:
    """With any value in the place of one of its fields, a message is either refused, or arrives again as it was taken:
    nothing else is raised."""
    fields = message.to_json()
    name = data.draw(st.sampled_from(sorted(fields) or ["more"]))
    fields[name] = data.draw(_anything)
    made, _ = decode([json.dumps({"op": type(message).__name__, "id": None, "fields": fields}).encode()])
    if isinstance(made, Message):
        assert plain(decode(encode(made))[0]) == plain(made) or "nan" in repr(made).lower()
