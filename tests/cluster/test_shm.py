"""A cluster whose groups are in shared memory: training, interrupts, errors, deaths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_lab.errors import CellError, FallbackWarning
from tests.benchmarks.recovery import SETUP, STATES, interrupted
from tests.cluster.conftest import Lab
from tests.cluster.hanging import diagnosed, told_apart

REPLACES_PROCESSES = True

WAITING = (
    "collective that one rank does not enter",
    "collective of a user's group",
    "backward with buckets in flight",
)
THREADS_OF_A_GROUP = 2  # of the Gloo group within


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two ranks, with what the states need."""
    with Lab(2, backend="shm", hang_seconds=None) as cluster:
        cluster.run(SETUP)
        yield cluster


_FRAMES = """
import sys
from ddp_lab.diagnosis.on_rank import own_collectives
frames = [one for number in range(99) for one in own_collectives.frames_of(dist.group.WORLD.group_name, number)]
lines = [line for file, line in frames if "frames" in file]
"""
_ALONE = """
import os, tempfile
from pathlib import Path
import torch, torch.distributed as dist
from ddp_lab.engine.groups import registry
from ddp_lab.diagnosis.on_rank import own_collectives
registry.install()
own_collectives.install(Path(tempfile.gettempdir()))
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
exec(compile("\\n\\ndist.all_reduce(torch.ones(8))", "frames", "exec"))
{}
assert lines == [3], frames
assert "torch._inductor" not in sys.modules
"""


def test_frames_load_no_compiler(lab: Lab) -> None:
    """Collectives have frames of the same kind as Gloo's; to look at them loads no compiler."""
    lab.run("y = torch.ones(8)\n\ndist.all_reduce(y)", label="frames")
    assert lab.values(f"{_FRAMES}lines")[0] == [3]
    done = subprocess.run([sys.executable, "-c", _ALONE.format(_FRAMES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WAITING)
def test_interrupts_free_who_waits(lab: Lab, name: str) -> None:
    """Nothing is lost, and the next cell's collective works."""
    lab.run("import os")
    before = lab.values("os.getpid(), kept")
    interrupted(lab, STATES[name])
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
    assert lab.values("os.getpid(), kept") == before


def test_interrupts_leave_no_group(lab: Lab) -> None:
    """A group goes with the collective that was interrupted in it: not even its threads stay."""
    held = []
    for _ in range(4):
        interrupted(lab, STATES[WAITING[0]])
        lab.sum_of_ones()
        lab.run("import gc; gc.collect()")
        tasks = Path(f"/proc/{lab.pids()['rank 0']}/task").iterdir()
        held.append(sum((task / "comm").read_text() == "pt_gloo_runloop\n" for task in tasks))
    assert held[-1] - held[0] < 3 * THREADS_OF_A_GROUP, held  # the last error's may be there at any time


def test_different_calls_end_with_both(lab: Lab) -> None:
    """The error says what each rank has called."""
    with pytest.raises(CellError, match=r"different operations: .*all_reduce #\d+ of 16 B"):
        lab.run("dist.all_reduce(x) if rank else dist.broadcast(x, 0)")
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


@pytest.mark.parametrize("name", ["asynchronous"])
def test_the_doctor_says_why_it_hangs(lab: Lab, name: str) -> None:
    """As with Gloo, down to the number of the collective."""
    diagnosed(lab, name)


@pytest.mark.parametrize("name", ["only one"])
def test_ranks_that_run_apart(lab: Lab, name: str) -> None:
    """They are reported while all run on, with the line that launched what another rank lacks."""
    told_apart(lab, name)


def test_a_cluster_says_that_it_goes_through_gloo(lab: Lab) -> None:
    """Where its ranks can't share memory one line says why, and the ranks' records name Gloo; later it is as before."""
    lab.run("import os; os.environ['DDP_LAB_HOST_ID'] = str(rank)")
    with pytest.warns(FallbackWarning, match=r"shm: ranks 0 and 1 are on different hosts; .* use Gloo"):
        lab.rejoin()
    assert [one.backend for one in lab.status()] == ["cpu:gloo"] * 2
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
    lab.run("del os.environ['DDP_LAB_HOST_ID']")
    lab.rejoin()
    assert [one.backend for one in lab.status()] == ["cpu:shm"] * 2


def test_a_round_robin_group_is_freed_and_made_again(lab: Lab) -> None:
    """Who waits in one of its groups is freed; after the rejoin it and its groups are new ones."""
    lab.run("""
from ddp_lab.comm import round_robin_process_group
inner = [dist.new_group(backend="gloo"), dist.new_group(backend="shm")]
robin = round_robin_process_group(inner)
for _ in range(2):
    dist.all_reduce(torch.ones(1), group=robin)
""")
    for _ in range(2):  # a Gloo group's turn, and one in shared memory
        with pytest.raises(CellError, match="rank 1 failed: ValueError: on purpose"):
            lab.run("if rank == 1: raise ValueError('on purpose')\ndist.all_reduce(torch.ones(1), group=robin)")
        lab.run("x = torch.ones(1); dist.all_reduce(x, group=robin)")
        assert lab.values("x.item(), dist.get_backend(robin)") == dict.fromkeys((0, 1), (2.0, "round_robin"))
    lab.run("for one in (robin, *inner): dist.destroy_process_group(one)\ndel robin, inner")


def test_a_rank_that_dies_is_replaced(lab: Lab) -> None:
    """Its peer ends, a new process takes its place, and both train on; nothing of the former one is in /dev/shm."""
    former = lab.pids()["rank 1"]
    with pytest.raises(CellError, match="rank 1 was killed by SIGKILL"):
        lab.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(1))")
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
    assert lab.values("dist.get_backend()") == {0: "shm", 1: "shm"}
    assert not [name for name in os.listdir("/dev/shm") if str(former) in name]
