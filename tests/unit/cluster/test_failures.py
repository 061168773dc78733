"""Which rank is to blame, and how it is said."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from ddp_lab.cluster.cells.failures import (
    cell_error,
    end_of,
    ending,
    failure_of,
    in_order,
    interrupt_report,
    lost,
    timed_out,
    timeout_error,
)
from ddp_lab.diagnosis.rules import Diagnosis
from ddp_lab.documentation import more
from ddp_lab.errors import RankFailure
from ddp_lab.output.terminal import plain
from ddp_lab.protocol.messages import CellReport

CLOSED = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36248. This is typical"
HERE = (
    "ValueError  Traceback (most recent call last)\nCell %%distributed [3], line 2\n----> 2 boom()\n\nValueError: bad"
)


def failed(rank: int, name: str = "ValueError", message: str = "bad", at: int = 0, **more: object) -> RankFailure:
    return RankFailure(rank, name, message, str(more.get("traceback", "")), at, bool(more.get("secondary")))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_first_in_time_is_first(order: tuple[int, ...]) -> None:
    """The culprit leads and freed ranks follow as consequences, whatever the order in which they are reported."""
    reported = [
        failed(2, at=10),
        failed(0, "RuntimeError", CLOSED, at=20),
        failed(1, "DistBackendError", "NCCL communicator was aborted", at=30),
    ]
    ordered = in_order([reported[place] for place in order])
    assert list(ordered) == [2, 0, 1]
    assert [failure.secondary for failure in ordered.values()] == [False, True, True]


def test_communication_errors_are_consequences() -> None:
    """A collective that broke a moment before the culprit's own time stamp is still a consequence; with no other cause,
    the first broken collective leads."""
    ordered = in_order([failed(0, "RuntimeError", CLOSED, at=10), failed(1, at=11)])
    assert [(rank, failure.secondary) for rank, failure in ordered.items()] == [(1, False), (0, True)]
    ordered = in_order([failed(0, "RuntimeError", CLOSED, at=10), failed(1, "RuntimeError", CLOSED, at=20)])
    assert [failure.secondary for failure in ordered.values()] == [False, True]


def test_lost_and_interrupted_ranks() -> None:
    """The death of a process is the cause of what its peers report before it is noticed. A cell is interrupted if
    nothing else has happened on any rank; else the line and the error name what has."""
    ordered = in_order([failed(0, "RuntimeError", CLOSED, at=10), lost(1, "was killed by SIGKILL (signal 9)")])
    assert list(ordered) == [1, 0]
    error = cell_error(ordered, "train [2]")
    assert str(error) == "rank 1 was killed by SIGKILL (signal 9)"
    assert "rank 0 waited for rank 1 and was unblocked (RuntimeError: Connection closed by peer)" in plain(error.report)
    assert error.report.splitlines()[-1] == more("rank-killed")
    with_its_host = cell_error({1: lost(1, "was lost with host b: Connection reset")}, "train [2]")
    assert with_its_host.report.splitlines()[-1] == more("host-lost")
    interrupted = [failed(rank, "KeyboardInterrupt", "", at=rank) for rank in range(2)]
    alone = in_order(interrupted)
    assert (end_of(alone), ending("interrupted", alone, 5.2)) == ("interrupted", "■ interrupted after 5.2 s")
    assert str(cell_error(alone, "train [2]")) == "ranks 0–1 were interrupted"
    both = in_order([interrupted[0], failed(1, at=5)])
    assert (end_of(both), ending("failed", both, 5.2)) == ("failed", "✗ rank 1 failed after 5.2 s: ValueError: bad")
    error = cell_error(both, "train [2]")
    assert str(error) == "rank 1 failed: ValueError: bad"
    assert "rank 0 was interrupted" in plain(error.report)
    assert ending("failed", alone, 5.2) == "✗ interrupted by its time limit after 5.2 s"


def test_where_all_frames_are() -> None:
    """Of a traceback that is folded the report says how to see all of it, also of a cell that nobody waits for. What a
    data loader's worker has raised is in the one line, not only that it has."""
    folded = {0: RankFailure(0, "ValueError", "bad", "all of them", 0, False, short_traceback="some of them")}
    waited, background = (plain(cell_error(folded, "train [2]", run).report) for run in ("", "lab.results['train']"))
    assert "`import sys; print(sys.last_value.failures[0].traceback)`" in waited
    assert "`print(lab.results['train'].failures[0].traceback)`" in background
    said = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    said += (
        '  File "collate.py", line 9, in collate\nRuntimeError: unable to allocate shared memory(shm): No space left'
    )
    error = cell_error(in_order([failed(1, "RuntimeError", said + "\n")]), "train [2]")
    assert str(error) == (
        "rank 1 failed: RuntimeError: Caught RuntimeError in DataLoader worker process 0: unable to allocate shared "
        "memory(shm): No space left"
    )


def test_a_group_that_a_cell_makes_again() -> None:
    """Code of a tutorial that is pasted into a cell: the remedy stands under the error."""
    again = failed(0, message="trying to initialize the default process group twice!", traceback=HERE)
    told = plain(cell_error({0: again}, "[3]").report).splitlines()
    assert told[-1] == "→ The cluster has made the default group before the cell: remove this line."


@pytest.mark.parametrize("first", [0, 1])
def test_a_validation_on_one_rank(first: int) -> None:
    """Whichever rank is told first that the other broadcasts the buffers of a model in its forward."""
    message = "shm: ranks called different operations: rank 0 broadcast #21 of 128 B from rank 0, rank 1 barrier #21"
    in_forward = HERE.replace("\n", "\nFile distributed.py:276, in DistributedDataParallel._pre_forward(self)\n", 1)
    failures = {rank: failed(rank, message=message, traceback=in_forward if rank == 0 else HERE) for rank in (0, 1)}
    told = plain(cell_error({first: failures[first], 1 - first: failures[1 - first]}, "[3]").report)
    assert "→ The forward of a DistributedDataParallel model broadcasts its buffers" in told
    assert "call `model.module`" in told
    same = {rank: replace(one, traceback=HERE) for rank, one in failures.items()}
    assert "model.module" not in plain(cell_error(same, "[3]").report)


def test_a_traceback_reads_on_any_page() -> None:
    """Of IPython's colours, which can't all be read on both of JupyterLab's grounds, weight is left; the rest stays."""
    trace = (
        "\x1b[31mValueError\x1b[39m  Traceback\n\x1b[36mFile \x1b[39m\x1b[32m~/a.py:2\x1b[39m, in \x1b[36mf\x1b[39m\n"
        "\x1b[32m----> \x1b[39m \x1b[38;5;28;01mreturn\x1b[39;00m \x1b[30;43mboom\x1b[39;49m()"
        "  \x1b[38;5;66;03m# x\x1b[39;00m"
    )
    report = cell_error({0: failed(0, traceback=trace)}, "train [3]").report
    assert plain(trace) in plain(report)
    assert "\x1b[1mreturn\x1b[0m \x1b[30;43mboom\x1b[0m()  # x" in report
    assert report.startswith("\x1b[1;38;5;231;48;5;124mrank 0 failed\x1b[0m in cell train [3]")
    assert not re.search(r"\x1b\[3[1-79]m|\x1b\[38;5;(?!231)", report)


def test_failures_are_folded() -> None:
    """Equal failures share the headline, other ones take a line each, freed ranks one line together. All that a rank
    reports is kept."""
    failures = in_order(
        [
            failed(0, at=1_000_000, traceback=HERE),
            failed(1, at=2_000_000, traceback=HERE),
            failed(2, "KeyError", "'x'", at=31_000_000),
            failed(3, "RuntimeError", CLOSED, at=40_000_000),
            failed(4, "RuntimeError", CLOSED.replace("36248", "1"), at=41_000_000),
        ]
    )
    error = cell_error(failures, "%%distributed [3]")
    assert str(error) == "ranks 0–1 failed: ValueError: bad"
    lines = plain(error.report).splitlines()
    assert lines[0] == "ranks 0–1 failed in cell %%distributed [3]"
    assert lines[-2:] == [
        "rank 2 failed 30 ms later: KeyError: 'x'",
        "ranks 3–4 waited for rank 0 and were unblocked (RuntimeError: Connection closed by peer)",
    ]
    assert list(error.failures) == [0, 1, 2, 3, 4]
    assert error._render_traceback_() == error.report.splitlines()
    told = {"name": "E", "message": "m", "traceback": ["a", "b"], "brief": ["b"], "time_ns": 5}
    report = CellReport(False, consequence=True, waited_in="barrier #2", broke_backward=True, **told)  # type: ignore[arg-type]
    assert failure_of(3, report) == RankFailure(3, "E", "m", "a\nb", 5, True, "barrier #2", True, "b")


@pytest.mark.parametrize(("kind", "log"), [("lost", ["the last lines of the log of rank 1:", "Fatal"]), ("sizes", [])])
def test_what_ranks_entered_explains_an_abort(kind: str, log: list[str]) -> None:
    """Below what happened; then what Gloo wrote says nothing more."""
    failures = in_order([lost(1, "was killed by SIGABRT (signal 6)", "Fatal"), failed(0, "RuntimeError", CLOSED)])
    cause = Diagnosis(kind, "rank 0 entered this, rank 1 that.", "Enter the same.")
    lines = plain(cell_error(failures, "train [3]", cause=cause).report).splitlines()
    told = ["rank 0 entered this, rank 1 that.", "→ Enter the same."]
    assert lines[: 3 + len(log)] == ["rank 1 was killed by SIGABRT (signal 6) during cell train [3]", *told, *log]
    assert lines[3 + len(log)].startswith("The next cell")


def test_where_interrupted_ranks_were() -> None:
    """Equal places are shown once with the cell's own lines; a rank that does not answer is named. The error of a time
    limit names the ranks that had not ended, and those that do not answer."""
    failures = {
        rank: failed(rank, "KeyboardInterrupt", "", at=rank, traceback=HERE.replace("ValueError", "KeyboardInterrupt"))
        for rank in (0, 1)
    }
    lines = [plain(line) for line in interrupt_report(failures, (2,), "%%distributed [3]")]
    assert lines[:3] == [
        "KeyboardInterrupt: cell %%distributed [3] was interrupted",
        "ranks 0–1 were here:",
        "Cell %%distributed [3], line 2",
    ]
    assert lines[-1].startswith("rank 2 did not respond to the interrupt: `%cluster interrupt`")
    failures = in_order([failed(0, "KeyboardInterrupt", "", at=1, traceback=HERE), timed_out(1, 2.5, 9)])
    error = timeout_error(failures, (0, 1), "slow [1]", 2.5)
    assert str(error) == "ranks 0–1 did not end within 2.5 s"
    assert "rank 0 was here:" in plain(error.report)
    assert "rank 1 did not respond to the interrupt" in plain(error.report)
    assert error.report.splitlines()[-1] == more("cell-timeout")
