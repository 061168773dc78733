"""Where ranks are placed, decided without torch."""

from __future__ import annotations

import pytest

from ddp_lab.cluster.processes.devices import place
from ddp_lab.machine import visible_gpus


@pytest.mark.parametrize(
    ("chosen", "present", "visible"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        ("", 2, []),
        ("1", 2, ["1"]),
        ("1, 0", 2, ["1", "0"]),
        ("0,5,1", 2, ["0"]),
        ("-1", 2, []),
        ("0", 0, []),
        ("GPU-8f3c,MIG-77aa", 8, ["GPU-8f3c", "MIG-77aa"]),
    ],
)
def test_visible_gpus(chosen: str | None, present: int, visible: list[str]) -> None:
    """CUDA_VISIBLE_DEVICES is read as CUDA reads it: an invalid entry hides what follows."""
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environment, present) == visible


def test_two_cpu_ranks_without_gpu() -> None:
    """Without a GPU, or with the Gloo backend, the default is two CPU ranks, which share the processors."""
    placement = place(None, None, {}, gpus=[], cores=8, inherited={})
    assert placement.devices == place(None, None, {}, "gloo", gpus=["0"]).devices == ("cpu", "cpu")
    assert {variables["OMP_NUM_THREADS"] for variables in placement.rank_environments.values()} == {"4"}
    assert placement.environment["OMP_NUM_THREADS"] == "1", "while torch is imported"
    assert "CUDA_VISIBLE_DEVICES" not in placement.environment


@pytest.mark.parametrize(
    ("n", "chosen", "gpus", "devices", "visible"),
    [
        (None, None, ["3", "5"], ("cuda:0", "cuda:1"), "3,5"),
        (None, [0, 2], ["3", "5", "7"], ("cuda:0", "cuda:1"), "3,7"),
        (3, None, ["0", "1"], ("cuda:0", "cuda:1", "cuda:0"), "0,1"),
    ],
)
def test_ranks_on_gpus(
    n: int | None, chosen: list[int] | None, gpus: list[str], devices: tuple[str, ...], visible: str
) -> None:
    """One rank on each GPU, or on each chosen one (an index into the visible ones), by its local number; ranks that
    share a GPU each get a host name of their own, without which NCCL refuses them."""
    placement = place(n, chosen, {}, gpus=gpus)
    assert (placement.devices, placement.environment["CUDA_VISIBLE_DEVICES"]) == (devices, visible)
    names = {variables.get("NCCL_HOSTID") for variables in placement.rank_environments.values()}
    assert (len(names) == 3 and None not in names) if n else names == {None}


def test_users_variables_win() -> None:
    """A thread count that the user sets, for the ranks or for all processes, is kept."""
    placement = place(2, None, {"OMP_NUM_THREADS": "7"}, gpus=[], inherited={"MKL_NUM_THREADS": "3"})
    assert placement.environment["OMP_NUM_THREADS"] == "7"
    assert set(placement.rank_environments[0]) == {"OPENBLAS_NUM_THREADS"}
    assert "MKL_NUM_THREADS" not in placement.environment


@pytest.mark.parametrize(
    ("n", "devices", "message"),
    [(0, None, "at least one rank"), (None, [2], "2 GPUs are visible; there is no device 2"), (None, [], "devices")],
)
def test_impossible_placements(n: int | None, devices: list[int] | None, message: str) -> None:
    """Devices that don't exist and clusters without ranks are refused."""
    with pytest.raises(ValueError, match=message):
        place(n, devices, {}, gpus=["0", "1"])
