"""On a CUDA device with NCCL, both of them where torch has two: what their Flight Recorders note, as we read it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import spawn

from ddp_lab import Cluster
from ddp_lab.output.board import SilentBoard
from tests.gpu.ranks import NEEDS_NCCL
from tests.waiting import wait_until

pytestmark = NEEDS_NCCL

_TWO = hasattr(distributed_c10d, "_nccl2_device")  # from torch 2.15 on "nccl" builds nccl2, unless it is told not to
_SETTING = "TORCH_DIST_USE_NCCL2"
_BUILT = {"1": "nccl2", "0": "nccl"} if _TWO else {"0": "nccl"}  # setting -> backend


@pytest.fixture(params=_BUILT)
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the backend that the ranks' "nccl" builds."""
    monkeypatch.setenv(_SETTING, request.param)
    return _BUILT[request.param]


def _on_rank(rank: int, size: int, folder: str, built: str) -> None:
    os.environ["NCCL_HOSTID"] = f"host-{rank}"  # ranks that share one GPU
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    from ddp_lab.diagnosis.on_rank import own_collectives
    from ddp_lab.engine.groups import registry

    registry.install()
    own_collectives.install(Path(folder))
    began, store = time.monotonic_ns(), FileStore(f"{folder}/store", size)
    bound = registry.bound_to(device, "cpu:gloo,cuda:nccl")
    assert bound == ({"device_id": device} if built == "nccl2" else {})
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, **bound)
    small, large = torch.ones(4, device="cuda"), torch.ones(1 << 18, device="cuda")
    dist.all_reduce(small)
    torch.cuda.synchronize()

    def seen() -> list[Any]:
        return [one for one in own_collectives.collectives(began) if one["backend"] == built]

    wait_until(lambda: bool(seen()), "the first")
    assert own_collectives.left() == 0, "all that has ended is noted when it is asked for"
    [first] = seen()
    assert (first["entered"], first["open_count"]) == (1, 0)
    assert first["kinds"] == [("all_reduce", "float32 [4]", 16)]
    if built == "nccl2":
        name = dist.group.WORLD.group_name
        assert Path(__file__).name in [Path(file).name for file, _ in own_collectives.frames_of(name, 1)]
    work = dist.all_reduce(large, async_op=True) if rank == 0 else None
    if rank == 0:
        wait_until(lambda: own_collectives.in_flight().count == 1, "the one in flight")
        oldest = own_collectives.in_flight().oldest
        assert (oldest.name, oldest.number, oldest.bytes) == ("all_reduce", 2, 1 << 20)
    Path(folder, f"seen-{rank}").touch()
    wait_until(lambda: all(Path(folder, f"seen-{other}").exists() for other in range(size)), "the others")
    if work is None:
        dist.all_reduce(large)
    else:
        work.wait()
    torch.cuda.synchronize()
    wait_until(lambda: not own_collectives.in_flight().count, "the end of all")
    [last] = seen()
    assert (last["entered"], last["open_count"]) == (2, 0), "what has ended is still known"
    Path(folder, f"done-{rank}").touch()
    dist.destroy_process_group()


def test_what_nccl_has_in_flight(built: str) -> None:
    """An all-reduce that one rank alone has launched is in flight there, and is not when the other has come."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, (2, folder, built), nprocs=2)
        assert all(Path(folder, f"done-{rank}").exists() for rank in range(2))


_ALONE = """
import time
if rank == 1: time.sleep(600)
dist.all_reduce(torch.ones(1 << 18, device=device)); torch.cuda.synchronize()
"""
_DIFFERENT = """
t = torch.ones(1 << 18, device=device)
dist.all_reduce(t) if rank == 0 else dist.broadcast(t[:2], 0)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (_ALONE, ("in flight: all_reduce #", "of 1 MiB", "rank 1 has not entered")),
        (_DIFFERENT, ("rank 0 entered all_reduce #", "rank 1 broadcast #")),
    ],
)
def test_the_doctor_on_a_hang(built: str, code: str, words: tuple[str, ...]) -> None:
    """Ranks that hang on the GPU are reported from what its backend has noted, and an interrupt frees them."""
    with Cluster(2, env={_SETTING: os.environ[_SETTING]}) as lab:
        cell = lab.run(code, wait=False, board=SilentBoard())
        wait_until(lambda: all(some in str(lab.doctor()) for some in words), f"words about {built}")
        lab.interrupt()
        with pytest.raises(Exception, match="ranks 0–1 were interrupted"):
            cell.wait()
        works = "t = torch.ones(1, device=device); dist.all_reduce(t); t.item()"
        assert lab.run(works, board=SilentBoard()).values == {0: 2.0, 1: 2.0}
