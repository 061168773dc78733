"""A cell that fails or is interrupted ends on every rank, keeps variables and processes, and the next cell works."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ddp_lab import CellError
from ddp_lab.cluster.cells.run import CellRun
from ddp_lab.control.wire import Wire
from ddp_lab.output.terminal import plain
from ddp_lab.protocol.messages import Ping
from tests import leftovers
from tests.benchmarks.recovery import SETUP, STATES, State, interrupted
from tests.cluster.conftest import Lab
from tests.cluster.hanging import NO_FIXED_WAITS, WAITS_AGAIN, Announced, held, in_line
from tests.waiting import wait_until

# A cell that does not end by itself, for each state a rank may be in when it is interrupted.
AWAIT = State(
    "if rank == 0: dist.all_reduce(t)\nelse:\n    import asyncio; await asyncio.sleep(600)", ("all_reduce", "")
)
# Python drops an exception that leaves a destructor; what comes after it has to be interrupted, too.
DESTRUCTOR = State(
    "class Slow:\n    def __del__(self): time.sleep(600)\nSlow()\ntime.sleep(601)", ("in __del__", "in __del__")
)
HANGS = {**STATES, "await": AWAIT, "destructor": DESTRUCTOR}
BOTH = {0: 2.0, 1: 2.0}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two ranks on Gloo, which gives no way to end what waits; tests/cluster/test_shm.py has some of this on "shm"."""
    with Lab(2, backend="gloo") as cluster:
        cluster.run(SETUP)
        yield cluster


def state(lab: Lab) -> list[object]:
    """What must survive: process ids and a variable."""
    return [lab.values("import os; os.getpid(), kept"), lab.pids()]


@pytest.fixture
def steady(lab: Lab) -> Iterator[Lab]:
    """The module's cluster with tensors, a variable and a group; after the test ranks work and have what they had."""
    lab.run("import time; t, x = torch.ones(4), torch.ones(4); kept = f'kept on {rank}'; pair = dist.new_group([0, 1])")
    before = state(lab)
    yield lab
    assert lab.sum_of_ones() == BOTH
    assert state(lab) == before


def interrupt(run: CellRun) -> CellError:
    """Interrupts a cell; returns the error, of which each failed rank says that it was interrupted."""
    run.interrupt()
    with pytest.raises(CellError) as caught:
        run.wait()
    assert {failure.name for failure in caught.value.failures.values()} == {"KeyboardInterrupt"}
    return caught.value


def raise_while_peers_wait(lab: Lab) -> None:
    """Rank 1 raises while rank 0 waits in an all-reduce: both end, the culprit is named first."""
    with pytest.raises(CellError) as caught:
        lab.run("if rank == 1:\n    raise ValueError('on purpose')\ndist.all_reduce(t)")
    failures = caught.value.failures
    assert list(failures) == [1, 0]
    answers = lab.wire.request([0, 1], Ping(), 10.0)
    assert {rank: answer.broken_by for rank, answer in answers.items()} == {0: "rank 1", 1: "failed"}
    assert (failures[1].name, failures[1].message, failures[1].secondary) == ("ValueError", "on purpose", False)
    assert failures[0].secondary


def test_raise_while_peers_wait(steady: Lab) -> None:
    """A rank that raises frees the peer that waits for it, and is named first; nothing is lost."""
    raise_while_peers_wait(steady)


def test_peers_of_a_failed_rank_wait_for_events(steady: Lab, tmp_path: Path) -> None:
    """A rank that waits for a failed one is unblocked by what it is told, not because some time has passed; its error
    is formatted once."""
    steady.run(
        f"{NO_FIXED_WAITS}\nformatted = []\nformatter = get_ipython().InteractiveTB\n"
        "def counted(*a, **k): formatted.append(a); return type(formatter).structured_traceback(formatter, *a, **k)\n"
        "formatter.structured_traceback = counted"
    )
    flag = tmp_path / "rank 0 waits"
    run = steady.run(
        "import os, time\nif rank == 1:\n"
        f"    while not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "    raise ValueError\n"
        "dist.all_reduce(t)",
        wait=False,
    )
    wait_until(in_line(steady, 0, "work.wait()"), "rank 0 in the collective")
    flag.touch()
    with pytest.raises(CellError) as caught:
        run.wait()
    assert list(caught.value.failures) == [1, 0]
    assert steady.values("len(formatted)") == {0: 1, 1: 1}
    steady.run(f"{WAITS_AGAIN}\ndel formatter.structured_traceback")


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS.keys())
def test_interrupt_frees_whoever_waits(steady: Lab, hang: State) -> None:
    """An interrupt ends a cell, whatever its ranks are stuck in; processes and variables are kept."""
    interrupted(steady, hang)
    assert steady.sum_of_ones() == BOTH
    assert steady.values("g = torch.ones(1); dist.all_reduce(g, group=pair); g.item()") == BOTH


def test_an_error_that_takes_long_to_tell(steady: Lab) -> None:
    """The code of a rank's cell has ended, its error is not told yet: the next cell waits for that instead of being
    refused, and nobody says that this rank continues."""
    board = Announced()
    slow = "class Slow(Exception):\n    def __str__(self):\n        time.sleep(1.5)\n        return 'slow'\n"
    cell = f"import time\n{slow}if rank == 0: raise Slow\ndist.all_reduce(t)"
    running = steady.run(cell, wait=False, board=board)
    wait_until(lambda: steady.status()[0].state == "unblocked", "the end of rank 0's code")
    assert steady.sum_of_ones() == BOTH
    with pytest.raises(CellError, match="rank 0 failed: Slow: slow"):
        running.wait()
    assert board.said == []


def test_a_worker_that_dies_between_cells_ends_no_rank(steady: Lab) -> None:
    """The rank keeps its process and its variables; whoever uses the data loader next is told."""
    steady.run(
        "class Numbers(torch.utils.data.Dataset):\n    def __len__(self): return 400\n"
        "    def __getitem__(self, index): return index\n"
        # Forked: from Python 3.14 on that is not the default.
        "batches = iter(torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context='fork'))\n"
        "next(batches)"
    )
    workers = steady.values("[worker.pid for worker in batches._workers]")
    for pid in (pid for pids in workers.values() for pid in pids):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not leftovers.alive(pid), "the worker's end")  # noqa: B023  it is called here
    with pytest.raises(CellError, match=r"DataLoader worker .* exited unexpectedly"):
        steady.run("for batch in batches: pass")
    steady.run("del batches")


@pytest.mark.parametrize(("ends", "code"), [("raise ValueError('of the copy')", 1), ("pass", 0)])
def test_a_forked_process_never_is_a_rank(steady: Lab, ends: str, code: int) -> None:
    """A process that a cell forks ends where the cell's code does; the rank's groups and answers are its own."""
    statuses = steady.values(
        f"import os\npid = os.fork()\nif pid == 0: {ends}\nelse: status = os.waitpid(pid, 0)[1]\n"
        "dist.barrier() if pid else None\nos.waitstatus_to_exitcode(status) if pid else None"
    )
    assert statuses == {0: code, 1: code}


def test_an_interrupt_leaves_no_lock_taken(steady: Lab) -> None:
    """Interrupted again and again where a lock has just been taken, a rank ends its cell with the lock given back, also
    if that call takes longer than the time between two signals; one that waits for a lock is interrupted all the
    same."""
    steady.run(
        "import threading; lock = threading.Lock()\n"
        "class Held:\n"
        "    def __enter__(self): lock.acquire(); time.sleep(0.08)\n"
        "    def __exit__(self, *error): time.sleep(0.08); lock.release()"
    )
    for _ in range(3):
        interrupted(steady, State("while True:\n    with Held(): time.sleep(0.02)", ("with Held()", "with Held()")))
        assert steady.values("lock.locked()") == {0: False, 1: False}
    interrupted(steady, State("lock.acquire()\nwith Held(): pass", ("__enter__", "__enter__")))


def test_an_interrupt_leaves_no_command_running(steady: Lab, tmp_path: Path) -> None:
    """Interrupted while it still starts a shell command, a rank ends the command, too."""
    before = leftovers.processes()
    steady.run(
        "import ptyprocess, pathlib; starts = ptyprocess.PtyProcess.spawn\n"
        "def deep(): [time.sleep(0.1) for _ in range(1)]\n"
        "def slowly(*given, **options):\n"
        f"    made = starts(*given, **options); pathlib.Path({str(tmp_path)!r}, str(rank)).touch(); deep()\n"
        "    return made\n"
        "ptyprocess.PtyProcess.spawn = slowly"
    )
    running = steady.run("get_ipython().system('sleep 600')", wait=False)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "commands that start on both ranks")
    steady.interrupt()
    running.wait()
    steady.run("ptyprocess.PtyProcess.spawn = starts")
    wait_until(lambda: not leftovers.processes().keys() - before.keys(), "the commands' end")


def test_an_interrupt_in_a_backward_discards_it(steady: Lab) -> None:
    """One rank in its backward, one before it: no rank keeps gradients of the step, the report says so, and the next
    step is right."""
    steady.run(
        "net = ddp_lab.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)]),"
        " bucket_cap_mb=0.0001)\nfor _ in range(3): net.zero_grad(); net(x).sum().backward()"
    )
    before = steady.values("[p.grad.tolist() for p in net.parameters()]")
    run = steady.run("if rank == 1: time.sleep(600)\n(net(x).sum() * 1e6).backward()", wait=False)
    wait_until(in_line(steady, 0, "run_backward("), "rank 0 in its backward")
    error = interrupt(run)
    assert {failure.rank: failure.broke_backward for failure in error.failures.values()} == {0: True, 1: False}
    assert "a backward was in progress on rank 0 and is discarded" in error.report
    assert steady.values("[p.grad for p in net.parameters()]") == dict.fromkeys((0, 1), [None] * 12)
    steady.run("net(x).sum().backward()")
    assert steady.values("[p.grad.tolist() for p in net.parameters()]") == before
    steady.run("del net")


def test_an_interrupt_as_the_cell_is_sent(steady: Lab) -> None:
    """An interrupt that comes when the cell has just been sent ends it on both ranks."""

    def press(frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code is Wire.send.__code__:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)

    sys.setprofile(press)
    with pytest.raises(KeyboardInterrupt):
        steady.run("dist.all_reduce(torch.ones(4)) if rank == 0 else dist.barrier()\nwhile True: pass")
    assert sys.getprofile() is None


@pytest.mark.parametrize("call", ["dist.send(large, 1)", "dist.broadcast(large, 0)"])
def test_an_interrupt_while_a_tensor_is_on_its_way(steady: Lab, call: str) -> None:
    """Rank 0 ends though its peer is stopped and takes no more of a large tensor: Gloo itself forgets who sends it."""
    pid = steady.pids()["rank 1"]
    receive = "dist.irecv(large, 0)" if "send" in call else "dist.broadcast(large, 0, async_op=True)"
    run = steady.run(
        "import os, psutil, signal\n"
        "large = torch.ones(1 << 25)\n"
        f"work = {receive} if rank == 1 else None\n"
        "dist.barrier(group=pair)\n"
        "if rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    work.wait()\n"
        "else:\n"
        f"    while psutil.Process({pid}).status() != psutil.STATUS_STOPPED: time.sleep(0.01)\n"
        f"    {call}",
        wait=False,
    )
    try:
        wait_until(in_line(steady, 0, call), "rank 0 in the call")
        run.interrupt()
        wait_until(lambda: run.status().ranks[0] == "interrupted", "the end of rank 0's cell")
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(CellError) as caught:
        run.wait()
    assert {failure.name for failure in caught.value.failures.values()} == {"KeyboardInterrupt"}
    steady.run("del large, work")


@pytest.mark.parametrize("code", ["while True: pass", "dist.all_reduce(t)"])
def test_an_interrupt_reaches_who_has_not_begun(steady: Lab, code: str) -> None:
    """A rank that still had another cell to end is interrupted in the interrupted one when it begins it; that other
    cell is not disturbed."""
    earlier = steady.run("import time; time.sleep(1); 'whole'", ranks=[1], wait=False)
    run = steady.run(code, wait=False)
    wait_until(in_line(steady, 0, code.split("; ")[-1]), "rank 0 in the cell")
    assert set(interrupt(run).failures) == {0, 1}
    assert earlier.wait().values == {1: "whole"}


def test_interrupted_collective_is_reported_as_an_interrupt(steady: Lab) -> None:
    """A rank that was interrupted in a collective reports KeyboardInterrupt at the cell's line, not a closed socket."""
    run = steady.run("a = 1\nif rank == 0:\n    dist.all_reduce(t)\nelse:\n    dist.barrier()", wait=False)
    wait_until(in_line(steady, 0, "all_reduce(t)"), "rank 0 in the collective")
    shown = plain(interrupt(run).failures[0].traceback)
    assert "dist.all_reduce(t)" in shown
    assert "RuntimeError" not in shown


def test_same_slip_on_all_ranks_costs_no_rejoin(steady: Lab) -> None:
    """An error that all ranks make alike, and about at once, leaves the process groups as they were."""

    def groups_survive() -> bool:
        before = steady.values("id(dist.group.WORLD), id(pair)")
        with pytest.raises(CellError):
            steady.run("undefined_name")
        return steady.values("id(dist.group.WORLD), id(pair)") == before

    # On a busy machine one rank may be a tenth of a second behind the other.
    assert any(groups_survive() for _ in range(10))


def test_what_is_followed_by_a_rejoin(steady: Lab) -> None:
    """A failed cell after which one rank had entered more collectives than the other, and one that destroys the default
    group, as scripts do at their end. One that then makes it with what torchrun sets works, as does what follows."""
    with pytest.raises(CellError):
        steady.run("if rank == 0: work = dist.all_reduce(t, async_op=True)\nraise ValueError")
    assert steady.sum_of_ones() == BOTH
    steady.run("dist.destroy_process_group()")
    assert steady.sum_of_ones() == BOTH
    made = "dist.destroy_process_group(); dist.init_process_group('gloo')"
    for _ in range(2):
        assert steady.values(f"{made}\nt = torch.ones(1); dist.all_reduce(t); t.item()") == BOTH
        steady.rejoin()
    assert steady.sum_of_ones() == BOTH
    steady.run("more = [dist.new_group() for _ in range(8)]; del more")


def test_freeing_needs_more_than_destroying(steady: Lab) -> None:
    """With models, a work and a reference alive, destroying the group frees no peer; our way does, and rejoins."""
    steady.run(
        "models = [one(torch.nn.Linear(2, 2)) for one in"
        " (torch.nn.parallel.DistributedDataParallel, ddp_lab.DistributedDataParallel)]\n"
        "work = dist.all_reduce(torch.ones(1), async_op=True); work.wait()\n"
        "reference = dist.group.WORLD"
    )
    code = "if rank == 0: dist.all_reduce(t)\ndist.destroy_process_group()\nimport time\ntime.sleep(600)"
    run = steady.run(code, wait=False)
    wait_until(in_line(steady, 1, "time.sleep(600)"), "rank 1 after the group's end")
    threading.Event().wait(0.5)
    assert in_line(steady, 0, "all_reduce(t)")()
    steady.interrupt([1])
    with pytest.raises(CellError) as caught:
        run.wait()
    assert {rank: failure.name for rank, failure in caught.value.failures.items()} == {
        1: "KeyboardInterrupt",
        0: "RuntimeError",
    }
    assert steady.sum_of_ones() == BOTH
    steady.run("del models, work, reference")


@pytest.mark.parametrize("model", ["ddp_lab.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel"])
def test_models_follow_to_the_new_group(steady: Lab, model: str) -> None:
    """A model that was training when a cell failed trains on after the rejoin, with equal gradients on all ranks."""
    steady.run(f"model = {model}(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))")
    step = "model.zero_grad(); model(torch.full((4, 8), float(rank))).sum().backward()"
    steady.run(step)
    with pytest.raises(CellError):
        steady.run(f"if rank == 1: raise ValueError\n{step}")
    steady.run(step)
    steady.run(step)
    gradients = steady.values("[float(p.grad.sum()) for p in model.parameters()]")
    assert gradients[0] == gradients[1]
    assert steady.values("model.process_group is dist.group.WORLD") == {0: True, 1: True}
    steady.run("del model")


def test_a_model_that_was_never_made(steady: Lab) -> None:
    """Torch's constructor refuses models that differ, and leaves one without a reducer: the ranks rejoin even so."""
    make = "half = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)\n"
    make += "torch.nn.Module.__init__(half)\nif rank == 1: raise ValueError\ndist.all_reduce(torch.ones(1))"
    with pytest.raises(CellError):
        steady.run(make)
    assert steady.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_users_groups_are_rebuilt_and_names_follow(steady: Lab) -> None:
    """After a rejoin every name, attribute, list and closure that held a group of the user's holds the new one."""
    steady.run(
        "class Holder: pass\n"
        "holder = Holder(); holder.group = pair; listed = [pair]\n"
        "def closure(group=None):\n"
        "    inner = pair\n"
        "    return lambda: inner\n"
        "held_by_closure = closure(); old = id(pair)"
    )
    raise_while_peers_wait(steady)
    same = "holder.group is pair and listed[0] is pair and held_by_closure() is pair"
    assert steady.values(same) == {0: True, 1: True}
    assert steady.values("g = torch.ones(1); dist.all_reduce(g, group=pair); g.item()") == BOTH
    assert steady.values("dist.get_process_group_ranks(pair)") == {0: [0, 1], 1: [0, 1]}
    steady.run("del holder, listed, held_by_closure")


def test_groups_made_otherwise_are_rebuilt(steady: Lab) -> None:
    """Groups of some ranks only, made without the others, and device meshes work after a rejoin."""
    steady.run(
        "alone = dist.new_group([rank], use_local_synchronization=True)\n"
        "both, *more = [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(4)]\n"
        "mesh = dist.init_device_mesh('cpu', (2, 1), mesh_dim_names=('outer', 'inner'))"
    )
    raise_while_peers_wait(steady)
    code = "g = torch.ones(1); dist.all_reduce(g, group={}); g.item()"
    for group, expected in (("alone", 1.0), ("both", 2.0), ("more[2]", 2.0), ("mesh['outer'].get_group()", 2.0)):
        assert steady.values(code.format(group)) == {0: expected, 1: expected}
    steady.run("del alone, both, more, mesh")


def test_groups_that_take_turns_are_rebuilt(steady: Lab) -> None:
    """A round robin group, one with the default group in it, and a model on one work after each of two rejoins."""
    steady.run(
        "from ddp_lab.comm import round_robin_process_group\n"
        "inner = [dist.new_group() for _ in range(2)]\n"
        "turns = round_robin_process_group(inner)\n"
        "model = ddp_lab.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=turns, bucket_cap_mb=1e-6)\n"
        "mixed = round_robin_process_group([dist.group.WORLD, dist.new_group()])"
    )
    step = "model(torch.ones(1, 2) * (rank + 1)).sum().backward(); float(model.module.weight.grad[0, 0])"
    for _ in range(2):
        raise_while_peers_wait(steady)
        steady.run("model.zero_grad()")
        assert steady.values(step) == {0: 1.5, 1: 1.5}
        assert steady.values("model.process_group is turns") == {0: True, 1: True}
        for group in ("mixed", "turns"):
            assert steady.values(f"g = torch.ones(1); dist.all_reduce(g, group={group}); g.item()") == BOTH
        counted = steady.values("from ddp_lab.engine.groups import registry as g_; g_.sequences()[turns.group_name]")
        assert counted[0] == counted[1] >= 3  # two buckets and a tensor
    steady.run("dist.destroy_process_group(inner[0])\ndel inner")
    raise_while_peers_wait(steady)
    with pytest.raises(CellError, match=r"was lost: the groups that it consisted of were destroyed before: \S"):
        steady.run("turns.size()")
    steady.run("del model, turns, mixed")


@pytest.mark.soak
def test_pause_of_a_minute(steady: Lab) -> None:
    """A machine that pauses for a minute loses no rank: processes stopped that long go on as before."""
    pids = list(steady.pids().values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(65)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_sockets_of_others_are_left_alone(steady: Lab) -> None:
    """A descriptor that was closed and now belongs to another socket is not shut down."""
    code = (
        "import os, socket\n"
        "from ddp_lab.engine.groups import sockets\n"
        "a, b = socket.socketpair()\n"
        "number, inode = a.fileno(), os.fstat(a.fileno()).st_ino\n"
        "c, d = socket.socketpair()\n"
        "os.dup2(c.fileno(), number)\n"
        "sockets.shut_down((number, inode))\n"
        "sent = d.send(b'x'), a.recv(1)\n"
        "sockets.shut_down((number, os.fstat(number).st_ino))\n"
        "sent, a.recv(1)"
    )
    assert set(steady.values(code).values()) == {((1, b"x"), b"")}
    steady.run("del a, b, c, d")


def test_group_that_cannot_be_rebuilt_is_named(steady: Lab) -> None:
    """A group that can't be built again is replaced by one that raises by name when it is used."""
    steady.run("from ddp_lab.engine.groups import registry as groups; lost = dist.new_group([0, 1])")
    steady.run("next(g for g in groups.alive() if g.group is lost).backend = 'mpi'")
    steady.rejoin()
    with pytest.raises(CellError) as caught:
        steady.run("dist.all_reduce(t, group=lost)")
    assert "process group" in caught.value.failures[0].message
    assert "[0, 1]" in caught.value.failures[0].message
    steady.run("del lost")


@pytest.mark.soak
def test_a_controller_that_is_gone_for_good(tmp_path: Path) -> None:
    """One whose successors are killed, too, is given up: a sentence says so, the cell ends with its values, and
    `restart` gives a cluster that works."""
    with Lab(2) as lab:
        for number in range(2):
            said, gate = Announced(), tmp_path / f"gate {number}"
            run = lab.run(f"{held(gate)}\nrank", wait=False, board=said)

            def given_up() -> bool:
                if pid := lab.pids().get("controller"):
                    with contextlib.suppress(ProcessLookupError):  # it has just been seen to be gone
                        os.kill(pid, signal.SIGKILL)
                return any("`%cluster restart` starts new ones" in text for _, text in said.said)  # noqa: B023

            wait_until(given_up, "that it is given up")
            assert any("the controller was killed by SIGKILL" in text for _, text in said.said)
            gate.touch()
            assert run.wait().values == {0: 0, 1: 1}
            lab.restart()
            assert lab.sum_of_ones() == BOTH


def test_a_stopped_controller_keeps_no_cell_waiting(steady: Lab) -> None:
    """While the controller is stopped by a signal, cells run; they and the doctor say how it is continued."""
    said, pid = Announced(), steady.pids()["controller"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert steady.values("rank") == {0: 0, 1: 1}
        run = steady.run("import time\nwhile True: time.sleep(0.01)", wait=False, board=said)
        wanted = f"the controller is stopped (SIGSTOP): `kill -CONT {pid}` resumes it"
        wait_until(lambda: [text for _, text in said.said if text == wanted], "what is said")
        assert wanted in str(steady.doctor())
    finally:
        os.kill(pid, signal.SIGCONT)
    interrupt(run)


def test_a_worker_that_drops_its_interrupt_ends(steady: Lab) -> None:
    """As one does that is just being forked; it is interrupted again, after the cell has ended."""
    code = """
import multiprocessing, time
def stubborn():
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(600)
worker = multiprocessing.get_context("fork").Process(target=stubborn, daemon=True)
worker.start()
time.sleep(600)
"""
    interrupted(steady, State(code, ("time.sleep(600)", "time.sleep(600)")))
    wait_until(lambda: steady.values("worker.is_alive()") == {0: False, 1: False}, "the workers end")
