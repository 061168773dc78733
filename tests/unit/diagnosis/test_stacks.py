"""What a rank does, from made-up stacks as another process sees them."""

from __future__ import annotations

import pytest

from ddp_lab.diagnosis.collectives_in_flight import Collective, Flight, GroupFlights
from ddp_lab.diagnosis.snapshot import Place
from ddp_lab.diagnosis.stacks import place, snapshot_of_stack

TORCH = "/v/lib/python3.11/site-packages/torch"
C10D = Place(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce", "work.wait()", users=False)
BACKWARD = Place(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward", "run_backward(", users=False)
ALL_REDUCE = Collective("all_reduce", "float32 [4]", 16)
FLYING = GroupFlights(
    "2", "gloo", (0, 1), 7, 7, 1, {7: ALL_REDUCE}, (Flight(7, ALL_REDUCE, 5.0, ""),), 1, description="mesh_tp"
)


def user(text: str) -> Place:
    return Place("/home/u/train.py", 9, "<module>", text, users=True)


@pytest.mark.parametrize(
    ("text", "waits"),
    [("work.wait()", True), ("loss.item()", True), ("time.sleep(9)", False), ("data = next(it)", False)],
)
def test_without_c_frames(text: str, waits: bool) -> None:
    """With a collective in flight, the line says whether it is one that waits."""
    assert snapshot_of_stack(0, [user(text)], (FLYING,)).waits == waits
    assert not snapshot_of_stack(0, [user(text)]).waits


def test_a_file_of_another_host() -> None:
    """Its line is unknown here, so its function stands for it."""
    assert place("/no/such/train.py", 7, "train") == Place("/no/such/train.py", 7, "train", "train()", users=True)
    assert not place(f"{TORCH}/x.py", 7, "f").users
