"""Hangs and mistakes that people make, provoked on real ranks: the doctor has to say the right sentence of each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import CellError
from ddp_lab.client.doctor import Report
from ddp_lab.client.outputs import SilentBoard
from ddp_lab.insight.examined import Examined, Place
from tests.cluster.conftest import Lab
from tests.leftovers import wait_until

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
    "ended": ("if rank == 0: dist.all_reduce(torch.ones(1))", "ended", ("rank 1 has ended the cell", "all_reduce")),
    "different collectives": (
        "t = torch.ones(1 << 20)\nif rank == 0: dist.all_reduce(t)\n"
        "else: dist.broadcast(torch.ones(2), 0); dist.barrier()",
        "mismatch",
        (
            "rank 0 entered all_reduce #",
            "of 4 MiB (float32 [1048576]) at ",
            "rank 1 broadcast #",
            "of 8 B (float32 [2])",
        ),
    ),
    "both receive": (
        "dist.recv(torch.ones(1), 1 - rank)",
        "crossed",
        ("ranks 0 and 1 both wait to receive from each other",),
    ),
    "no sender": (
        "import time\nif rank == 0: dist.recv(torch.ones(1), 1)\nelse: time.sleep(600)",
        "peer",
        ("rank 0 waits for a message from rank 1", "time.sleep(600)"),
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
        ("rank 0 waits for bucket", "rank 1 never produced a gradient for head.", "not used in its forward"),
    ),
    "fewer batches": (
        MODEL + "for _ in range(2 + (rank == 0)):\n    model.zero_grad(); model(x).sum().backward()",
        "ended",
        ("rank 1 has ended the cell", "the backward, for bucket 0 of Heads"),
    ),
    "backward against barrier": (
        MODEL + "if rank == 0: model(x).sum().backward()\nelse: dist.barrier()",
        "backward",
        ("rank 0 is in the backward, for bucket 0", "rank 1 is in barrier"),
    ),
    "data": (
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Slow(Dataset):\n    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n        import time\n        time.sleep(600)\n"
        "if rank == 1: next(iter(DataLoader(Slow())))\ndist.all_reduce(torch.ones(1))",
        "busy",
        ("rank 0 waits in all_reduce", "rank 1 is in `time.sleep(600)`"),
    ),
    "event": (
        "import threading\nif rank == 1: threading.Event().wait()\ndist.all_reduce(torch.ones(1))",
        "busy",
        ("rank 0 waits in all_reduce", "rank 1 is in `threading.Event().wait()`"),
    ),
    "asynchronous": (
        "work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None\nif work: work.wait()",
        "ended",
        ("rank 1 has ended the cell", "rank 0 still waits in all_reduce #"),
    ),
}


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


def settled(lab: Lab, kind: str) -> Report:
    """What the doctor says as soon as it says the same of this kind for the second time: ranks may come late to
    where they hang.
    """
    seen: list[Report] = []

    def same() -> bool:
        seen.append(lab.doctor())
        last = {str(report.diagnosis) for report in seen[-2:]}
        return len(seen) > 1 and len(last) == 1 and seen[-1].diagnosis.kind == kind

    try:
        wait_until(same, 20, f"a diagnosis of the kind {kind}")
    except AssertionError as error:
        raise AssertionError(f"{error}; last: {seen[-1]}") from None
    return seen[-1]


@pytest.mark.parametrize("name", HANGS)
def test_the_sentence(lab: Lab, name: str) -> None:
    """The doctor names the reason, and interrupting leaves ranks that work."""
    code, kind, words = HANGS[name]
    with running(lab, code):
        report = settled(lab, kind)
    for some in words:
        assert some in report.diagnosis.sentence, report
    assert report.diagnosis.remedy
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_part_of_the_ranks(lab: Lab) -> None:
    """A cell that was given to one rank alone, but needs all, is told so."""
    with running(lab, "dist.all_reduce(torch.ones(1))", ranks=[0]):
        report = settled(lab, "subset")
    assert "which rank 1 has to enter, too" in report.diagnosis.sentence


def test_nothing_runs(lab: Lab) -> None:
    """Between cells there is nothing to say, and nobody is stuck."""
    report = lab.doctor()
    assert (report.diagnosis.kind, report.diagnosis.stuck) == ("idle", False)
    assert "rank 1 runs no cell" in str(report)


def test_a_paused_backward(lab: Lab) -> None:
    """A breakpoint is no hang: it is named with what to do."""
    lab.run(MODEL + "model(x).sum().backward()")
    lab.breakpoints("bucket_ready")
    cell = lab.run("model(x).sum().backward()", wait=False)
    report = settled(lab, "paused")
    lab.resume()
    cell.wait()
    assert "bucket ready: bucket 0" in report.diagnosis.sentence
    assert "lab.resume()" in report.diagnosis.remedy


class Announced(SilentBoard):
    """Keeps what is said of the cell."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[list[int], str]] = []

    def announce(self, ranks: Iterable[int], text: str, stays: bool = False) -> None:
        self.said.append((sorted(ranks), text))


def test_a_cell_without_progress_says_so_once(lab: Lab) -> None:
    """While ranks wait for each other longer than the watch time the cell is told why, once; outputs are progress."""
    board, lab.watch_seconds = Announced(), 0.6
    try:
        with running(lab, HANGS["sleep"][0], board=board):
            wait_until(lambda: bool(board.said), 20, "the word")
            settled(lab, "busy")
        ((ranks, text),) = board.said
        assert ranks == [0, 1]
        assert text.startswith("no progress for ")
        assert "rank 1 is in `time.sleep(600)`" in text
        talking = Announced()
        code = "import time\nfor i in range(20):\n    time.sleep(0.1); print(i)"
        lab.run(
            code + "\n    dist.barrier() if rank == 0 and i == 19 else None\nif rank: dist.barrier()", board=talking
        )
        assert talking.said == []
    finally:
        lab.watch_seconds = 10.0


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
        "the ranks run apart, by ",
        ("rank 0 launched all_reduce #", "rank 1 has not entered it", "`time.sleep(0.002)`", "line 4"),
    ),
    "more often": (
        LOOP + "    if rank == 0 or i % 8 == 0: works.append(dist.all_reduce(torch.ones(4), async_op=True))",
        "the ranks run apart, by ",
        ("rank 0 launched ", " and went on; rank 1 has not entered it"),
    ),
    "sends": (
        LOOP + "    if rank == 0: works.append(dist.isend(torch.ones(4), 1))",
        "the ranks run apart, by ",
        ("rank 0 launched operation #", "rank 1 has not entered it"),
    ),
    "ended": (
        "import time\nwork = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None\n"
        "if rank == 0: time.sleep(600)",
        "the ranks run apart, by 1: ",
        ("rank 0 launched all_reduce #", "rank 1 has ended the cell without it"),
    ),
}


@pytest.mark.parametrize("name", APART)
def test_ranks_that_run_apart(lab: Lab, name: str) -> None:
    """Ranks that make different calls are told of while all of them run on and print; works that never end go away."""
    code, begins, words = APART[name]
    board, lab.watch_seconds = Announced(), 0.6
    try:
        with running(lab, code, board=board):
            wait_until(lambda: bool(board.said), 20, "the word")
    finally:
        lab.watch_seconds = 10.0
    [text] = [said for _, said in board.said if "`%cluster doctor`" in said]
    assert text.startswith(begins)
    for some in words:
        assert some in text
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_ranks_that_catch_up_are_left_alone(lab: Lab) -> None:
    """Each rank is ahead in turn, by collectives that it does not wait for: they catch up, and nothing is said."""
    board, lab.watch_seconds = Announced(), 0.6
    code = (
        "import time\nfor i in range(12):\n    works = []\n    for j in range(40):\n"
        "        if rank == i % 2: time.sleep(0.004)\n"
        "        works.append(dist.all_reduce(torch.ones(4), async_op=True))\n    for work in works: work.wait()"
    )
    try:
        lab.run(code, board=board)
    finally:
        lab.watch_seconds = 10.0
    assert board.said == []


def test_what_is_in_flight(lab: Lab) -> None:
    """Launched collectives that have not ended are told with the oldest and its age, by doctor, status and vitals."""
    code = "import time\nwork = [dist.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(3)]\n"
    with running(lab, code.replace("= [", "= rank == 0 and [") + "time.sleep(600)"):
        wait_until(lambda: lab.doctor().diagnosis.kind == "ahead", 20, "the diagnosis")
        report = lab.doctor()
        vitals, status = lab.vitals(), lab.status()
    assert "rank 1 has not entered it" in report.diagnosis.sentence
    assert re.search(r"in flight: 3, oldest all_reduce #\d+ of 1 MiB for [\d.]+ s", str(report))
    for told in (vitals[0].in_flight, status[0].in_flight):
        assert re.fullmatch(r"3, oldest all_reduce #\d+ of 1 MiB for [\d.]+ s", told)
    assert (vitals[1].in_flight, status[1].in_flight) == ("", "")


def test_a_cell_that_computes_is_left_alone(lab: Lab) -> None:
    """Nobody waits: however long it takes, nothing is said."""
    board, lab.watch_seconds = Announced(), 0.3
    try:
        lab.run("import time; time.sleep(2)", board=board)
        assert board.said == []
    finally:
        lab.watch_seconds = 10.0


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    """Of a rank that is gone the doctor says how it ended."""
    with Lab(2) as cluster:
        with pytest.raises(CellError):
            cluster.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
        found = cluster.doctor().diagnosis
    assert found.kind == "dead"
    assert "rank 1 is gone" in found.sentence
    assert "SIGKILL" in found.sentence


def test_a_rank_that_holds_the_interpreter(tmp_path: Path) -> None:
    """A call into C that keeps Python's lock answers nobody: the rank is said to be silent, and who waits for it."""
    with Lab(2) as cluster:
        code = "import ctypes\nif rank == 1: ctypes.PyDLL(None).usleep(6_000_000)\ndist.barrier()"
        cell = cluster.run(code, wait=False)
        report = settled(cluster, "silent")
        assert report.diagnosis.stuck
        assert "rank 1 does not answer" in report.diagnosis.sentence
        assert "rank 0 waits for it" in report.diagnosis.sentence
        cell.wait()


def test_the_report_escapes_what_ranks_say() -> None:
    """Text of a rank can't bring markup into the notebook."""
    place = Place("<cell <b>x</b>>", 1, "<i>", "f('<script>')", users=True)
    shown = Report.of([Examined(0, "running", stack=(place,))])._repr_html_()
    assert "<script>" not in shown
    assert "<b>x" not in shown
    assert "&lt;script&gt;" in shown
