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
    """Without a GPU the default is two CPU ranks that share the processors."""
    placement = place(None, None, {}, gpus=[], cores=8, inherited={})
    assert placement.devices == ("cpu", "cpu")
    assert {variables["OMP_NUM_THREADS"] for variables in placement.rank_environments.values()} == {"4"}
    assert placement.environment["OMP_NUM_THREADS"] == "1", "while torch is imported"
    assert "CUDA_VISIBLE_DEVICES" not in placement.environment


def test_one_rank_per_gpu() -> None:
    """With GPUs the default is one rank on each, by its local number."""
    placement = place(None, None, {}, gpus=["3", "5"])
    assert placement.devices == ("cuda:0", "cuda:1")
    assert placement.environment["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert not any("NCCL_HOSTID" in variables for variables in placement.rank_environments.values())


def test_chosen_devices() -> None:
    """Chosen devices are indices into the visible ones, and the ranks see only these."""
    placement = place(None, [0, 2], {}, gpus=["3", "5", "7"])
    assert placement.devices == ("cuda:0", "cuda:1")
    assert placement.environment["CUDA_VISIBLE_DEVICES"] == "3,7"


def test_more_ranks_than_gpus() -> None:
    """Ranks that share a GPU each get a host name of their own, without which NCCL refuses them."""
    placement = place(3, None, {}, gpus=["0", "1"])
    assert placement.devices == ("cuda:0", "cuda:1", "cuda:0")
    assert len({variables["NCCL_HOSTID"] for variables in placement.rank_environments.values()}) == 3


def test_gloo_means_cpu() -> None:
    """With the Gloo backend ranks run on the CPU though there are GPUs."""
    assert place(None, None, {}, "gloo", gpus=["0"]).devices == ("cpu", "cpu")


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
