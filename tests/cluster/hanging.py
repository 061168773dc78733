"""Cells that hang, or whose ranks drift out of step, what the doctor reports on each, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import CellError
from ddp_lab.diagnosis.report import HangReport
from ddp_lab.output.board import SilentBoard
from ddp_lab.protocol.messages import Ping
from tests import leftovers
from tests.cluster.conftest import Lab
from tests.waiting import wait_until

MODEL = """
torch.manual_seed(0)
class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    def forward(self, x, use=True):
        x = self.body(x)
        return self.head(x) if use else x
model = ddp_lab.DistributedDataParallel(Heads(), bucket_cap_mb=0.00001)
x = torch.ones(2, 4)
"""
# name -> the cell, the kind of the diagnosis, and words that its sentence has to have
HANGS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "sleep": (
        "import time\nif rank == 1:\n    time.sleep(600)\ndist.all_reduce(torch.ones(1))",
        "busy",
        ("rank 0 waits in all_reduce", "of 4 B (float32 [1])", "rank 1 is in `time.sleep(600)` at", "line 3"),
    ),
    "python loop": (
        # In the call, or in the jump back over the whole line.
        "loss = [0.0] * 100\nif rank == 0:\n    while True: sum(loss)\ndist.barrier()",
        "busy",
        ("rank 1 waits in barrier", "rank 0 is in `", "sum(loss)`", "line 3"),
    ),
    "ended": ("if rank == 0: dist.all_reduce(torch.ones(1))", "ended", ("rank 1 has finished the cell", "all_reduce")),
    "different collectives": (
        "t = torch.ones(1 << 20)\nif rank == 0: dist.all_reduce(t)\n"
        "else: dist.broadcast(torch.ones(2), 0); dist.barrier()",
        "mismatch",
        (
            "rank 0 entered all_reduce #",
            "of 4 MiB (float32 [1048576]) at %%distributed [3]",
            " line 2, rank 1 broadcast #",
            "of 8 B (float32 [2]) at %%distributed [3]",
            " line 3",
        ),
    ),
    "both receive": (
        "dist.recv(torch.ones(1), 1 - rank)",
        "crossed",
        ("ranks 0 and 1 are both waiting to receive from each other",),
    ),
    "no sender": (
        "import time\nif rank == 0: dist.recv(torch.ones(1), 1)\nelse: time.sleep(600)",
        "peer",
        ("rank 0 (", "waits for a message from rank 1", "time.sleep(600)"),
    ),
    "no sender, by a handle without a name": (
        "import time\nif rank == 0: dist.irecv(torch.ones(1), 1).wait()\nelse: time.sleep(600)",
        "peer",
        ("rank 0 (", "waits for a message from rank 1", "time.sleep(600)"),
    ),
    "group by some": (
        "if rank == 0: dist.new_group([0, 1])\nelse: dist.all_reduce(torch.ones(1))",
        "group",
        ("rank 0 is in new_group", "rank 1 is in all_reduce"),
    ),
    "two groups": (
        "a, b = groups_ if rank == 0 else groups_[::-1]\ndist.all_reduce(torch.ones(1), group=a)",
        "groups",
        ("different groups",),
    ),
    "unused parameter": (
        MODEL + "model(x, use=rank == 0).sum().backward()",
        "unused",
        ("rank 0 waits for bucket", "rank 1 never produced a gradient for head.", "unused in its forward pass"),
    ),
    "fewer batches": (
        MODEL + "for _ in range(2 + (rank == 0)):\n    model.zero_grad(); model(x).sum().backward()",
        "ended",
        ("rank 1 has finished the cell", "the backward, for bucket 0 of Heads"),
    ),
    "backward against barrier": (
        MODEL + "if rank == 0: model(x).sum().backward()\nelse: dist.barrier()",
        "backward",
        ("rank 0 is in the backward, for bucket 0", "rank 1 is in barrier"),
    ),
    "asynchronous": (
        "work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None\nif work: work.wait()",
        "ended",
        ("rank 1 has finished the cell", "rank 0 still waits in all_reduce #"),
    ),
}
LOOP = "import time\nworks = []\nfor i in range(100_000):\n    time.sleep(0.002)\n"
# name -> a cell in which no rank waits, how what is said of it begins, and words that it has
APART: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "other collectives": (
        LOOP
        + "    works.append(dist.all_reduce(torch.ones(1 << 18), async_op=True) if rank == 0 else\n"
        + "        dist.broadcast(torch.ones(2), 0, async_op=True))",
        "the ranks make different calls: ",
        (
            "rank 0 entered all_reduce #",
            "of 1 MiB (float32 [262144]) at %%distributed [3]",
            " line 5, rank 1 broadcast #",
            "of 8 B (float32 [2]) at %%distributed [3]",
            " line 6.",
        ),
    ),
    "other tensors": (  # of other sizes, Gloo would abort a process
        LOOP + "    works.append(dist.all_reduce(torch.ones(4).to([torch.float32, torch.int32][rank]), async_op=True))",
        "the ranks make different calls: ",
        (
            "of 16 B (float32 [4]) at ",
            ", rank 1 all_reduce #",
            "of 16 B (int32 [4]) at ",
            "line 5: the tensors differ.",
        ),
    ),
    "only one": (
        LOOP + "    if rank == 0 or i < 3: works.append(dist.all_reduce(torch.ones(4), async_op=True))",
        "the ranks are out of step, by ",
        ("rank 0 launched all_reduce #", "rank 1 has not entered it", "`time.sleep(0.002)`", "line 4"),
    ),
    "sends": (
        LOOP + "    if rank == 0: works.append(dist.isend(torch.ones(4), 1))",
        "the ranks are out of step, by ",
        ("rank 0 launched operation #", "rank 1 has not entered it"),
    ),
    "ended": (
        "import time\nwork = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None\n"
        "if rank == 0: time.sleep(600)",
        "the ranks are out of step, by 1 collective: ",
        ("rank 0 launched all_reduce #", "rank 1 finished the cell without entering it"),
    ),
}


class Announced(SilentBoard):
    """Keeps what is said of the cell."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[list[int], str]] = []

    def announce(self, ranks: Iterable[int], text: str, stays: bool = False) -> None:
        self.said.append((sorted(ranks), text))


@contextlib.contextmanager
def impatient(lab: Lab, seconds: float = 0.6) -> Iterator[Announced]:
    """A board for cells that are watched with this time until the end of the block."""
    before, lab.hang_seconds = lab.hang_seconds, seconds
    try:
        yield Announced()
    finally:
        lab.hang_seconds = before


@contextlib.contextmanager
def running(lab: Lab, code: str, **options: Any) -> Iterator[None]:
    """A cell that hangs, until the end of the block."""
    lab.run("groups_ = [dist.new_group([0, 1]) for _ in range(2)]") if "groups_" in code else None
    cell = lab.run(code, wait=False, label="%%distributed [3]", **options)
    try:
        yield
    finally:
        lab.interrupt()
        with pytest.raises((CellError, KeyboardInterrupt)):
            cell.wait()


def settled(lab: Lab, kind: str) -> HangReport:
    """What the doctor says as soon as it says the same of this kind for the second time: ranks may come late to
    where they hang.
    """
    seen: list[HangReport] = []

    def same() -> bool:
        seen.append(lab.doctor())
        last = {str(report.diagnosis) for report in seen[-2:]}
        return len(seen) > 1 and len(last) == 1 and seen[-1].diagnosis.kind == kind

    try:
        wait_until(same, f"a diagnosis of the kind {kind}")
    except AssertionError as error:
        raise AssertionError(f"{error}; last: {seen[-1]}") from None
    return seen[-1]


def told_apart(lab: Lab, name: str) -> None:
    """Asserts the diagnosis of ranks out of step, in that cell of `APART`, which is then interrupted."""
    code, begins, words = APART[name]
    with impatient(lab) as board, running(lab, code, board=board):
        wait_until(lambda: board.said, "the word")
    [text] = [said for _, said in board.said if "`%cluster doctor`" in said]
    assert text.startswith(begins)
    for some in words:
        assert some in text, text


def diagnosed(lab: Lab, name: str) -> HangReport:
    """Asserts the doctor's sentence about the cell of `HANGS` of that name, which is then interrupted."""
    code, kind, words = HANGS[name]
    with running(lab, code):
        report = settled(lab, kind)
    for some in words:
        assert some in report.diagnosis.sentence, report
    return report


# A rank that waits for a failed one does so until it is told, not for a time.
NO_FIXED_WAITS = (
    "from ddp_lab.engine import agent as agent_\n"
    "usual = {name: getattr(agent_, name) for name in ('_GRACE_SECONDS', '_NEWS_SECONDS')}\n"
    "for name in usual: setattr(agent_, name, 600)"
)
WAITS_AGAIN = "for name, seconds in usual.items(): setattr(agent_, name, seconds)"


def interrupt_when(condition: Callable[[], bool]) -> threading.Thread:
    """Presses the interrupt button once `condition` holds."""

    def press() -> None:
        wait_until(condition, "the moment to interrupt")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def held(gate: Path) -> str:
    """Code of a cell that goes on when this file is there."""
    return f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.005)"


def in_line(lab: Lab, rank: int, text: str) -> Callable[[], bool]:
    """Whether a rank's main thread is somewhere that shows `text` in its stack."""

    def look() -> bool:
        answers = lab.wire.request([rank], Ping(stack=True), 1.0)
        stack = answers[rank].stack if rank in answers else []
        return any(text in frame for frame in stack)

    return look


def kill_controller(lab: Lab) -> int:
    """Kills it as the system does that has no memory left; returns its process id once it is gone."""
    pid: int = wait_until(lambda: lab.pids().get("controller"), "the controller is forked")
    with contextlib.suppress(ProcessLookupError):  # nothing has needed a successor of the one that was killed before
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not leftovers.alive(pid), "the controller's end")
    return pid
