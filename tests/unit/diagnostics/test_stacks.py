"""What a rank does, from made-up stacks as another process sees them."""

from __future__ import annotations

import pytest

from ddp_lab.diagnostics.flights import Collective, Flight, GroupFlights
from ddp_lab.diagnostics.rank_state import Examined, Place
from ddp_lab.diagnostics.stacks import examined_stack, place

TORCH = "/v/lib/python3.11/site-packages/torch"
C10D = Place(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce", "work.wait()", users=False)
BACKWARD = Place(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward", "run_backward(", users=False)
ALL_REDUCE = Collective("all_reduce", "float32 [4]", 16)
FLYING = GroupFlights(
    "2", "gloo", (0, 1), 7, 7, 1, {7: ALL_REDUCE}, (Flight(7, ALL_REDUCE, 5.0, ""),), 1, description="mesh_tp"
)


def user(text: str) -> Place:
    return Place("/home/u/train.py", 9, "<module>", text, users=True)


def does(*stack: Place, native: list[str] | None = None, flights: tuple[GroupFlights, ...] = ()) -> str:
    return str(examined_stack(0, stack, flights, native))


def test_a_call_of_torch() -> None:
    """Named with the user's line, and with group and number if the recorder was read; a GPU's work is told apart, and
    one that moves does not wait."""
    assert does(C10D, user("dist.all_reduce(x)")) == "waits in all_reduce at /home/u/train.py:9"
    assert does(C10D, user("dist.all_reduce(x)"), flights=(FLYING,)) == (
        "waits in all_reduce #7 of 16 B (float32 [4]) on mesh dimension tp (ranks 0–1) at /home/u/train.py:9"
    )
    assert does(user("loss.item()"), native=["cudaStreamSynchronize libcudart.so"]) == (
        "waits in a synchronisation with its GPU at /home/u/train.py:9"
    )
    found = examined_stack(0, [C10D, user("dist.all_reduce(x)")], blocked=False)
    assert isinstance(found, Examined)
    assert not found.waits


@pytest.mark.parametrize(
    ("native", "waits"),
    [
        (["std::condition_variable::wait libstdc++.so", "c10d::Reducer::finalize_backward libtorch_cpu.so"], True),
        (["at::native::linear_backward libtorch_cpu.so"], False),
        ([], False),
        (None, False),
    ],
)
def test_a_backward(native: list[str] | None, waits: bool) -> None:
    """It waits for others if C++ says so; what computes, or is unknown, does not wait."""
    found = examined_stack(0, [BACKWARD, user("loss.backward()")], (), native)
    assert found.waits == waits
    if waits:
        assert str(found) == "waits in the backward, for its collectives at /home/u/train.py:9"


@pytest.mark.parametrize(
    ("text", "waits"),
    [("work.wait()", True), ("loss.item()", True), ("time.sleep(9)", False), ("data = next(it)", False)],
)
def test_without_c_frames(text: str, waits: bool) -> None:
    """With a collective in flight, the line says whether it is one that waits."""
    assert examined_stack(0, [user(text)], (FLYING,)).waits == waits
    assert not examined_stack(0, [user(text)]).waits


def test_a_file_of_another_host() -> None:
    """Its line is unknown here, so its function stands for it."""
    assert place("/no/such/train.py", 7, "train") == Place("/no/such/train.py", 7, "train", "train()", users=True)
    assert not place(f"{TORCH}/x.py", 7, "f").users
