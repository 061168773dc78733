"""The table of the cluster's panel without ranks: what is said of each, from what was heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from ddp_lab.control.records import RankHealth, RankRecord
from ddp_lab.dashboard.cluster_panel.processes import ProcessUse, ProcessWatch
from ddp_lab.dashboard.cluster_panel.rows import SILENT_SECONDS, cluster_rows, rank_rows, row_texts
from ddp_lab.diagnosis.collectives_in_flight import in_flight_words
from ddp_lab.output.status_table import cells_of
from ddp_lab.protocol.messages import GpuUse, Health, InFlight, OldestFlight
from ddp_lab.timeline.timeline import RankStatus
from tests.waiting import wait_until


def record(rank: int = 0, **fields: Any) -> RankRecord:
    """A rank of this host."""
    values = {"engine": rank, "pid": 100 + rank, "host": os.uname().nodename, "device": "cpu", "backend": "gloo"}
    return RankRecord(rank=rank, **{**values, "state": "idle", "cell": None, "exit_code": None, **fields})


def row(health: RankHealth, told: RankStatus | None = None, use: ProcessUse | None = None) -> dict[str, Any]:
    """The row of a single rank 0."""
    (made,) = cluster_rows([health], [told] if told else [], {0: use} if use else {})
    return made


def test_a_running_rank_names_its_cell() -> None:
    """A rank that runs a cell says which, for how long, at which step, and what its process takes. After a restart a
    rank has no step until its new process sends events, in the panel and in the dashboard."""
    health = RankHealth(record(state="running", cell="7-1"), "%%distributed [3]", 12.4, 0.2)
    made = row(health, RankStatus(0, state="running", step=41, events=9), ProcessUse(97.5, 3 << 20, stopped=False))
    assert (made["words"], made["seconds"], made["step"]) == ("runs %%distributed [3]", 12.4, 41)
    assert (made["cpu"], made["memory"], made["silent"]) == (97.5, 3 << 20, 0.2)
    titles, texts = row_texts([made])
    assert titles == ["rank", "state", "device", "memory", "CPU", "step", "heartbeat"]
    assert texts == [["0", "runs %%distributed [3] for 12 s", "cpu", "3 MiB", "98 %", "41", "0 s ago"]]
    heard = RankStatus(0, state="idle", step=41, last_event_ns=10**9, events=0)
    assert row(RankHealth(record()), heard)["step"] is None
    (made,) = rank_rows([heard], [record()])
    assert (made["step"], made["lastEvent"], made["recorded"]) == (-1, None, 0)


@pytest.mark.parametrize(
    ("fields", "stopped", "state", "words"),
    [
        ({"state": "lost", "exit_code": -9}, False, "lost", "killed by SIGKILL (signal 9)"),
        ({"state": "lost", "exit_code": 3}, False, "lost", "ended with exit code 3"),
        ({"state": "silent"}, True, "stopped", "stopped by SIGSTOP; continue with kill -CONT 100"),
        ({"state": "silent"}, False, "silent", "silent"),
        ({"state": "silent", "pid": 0}, False, "starting", "starting"),
        ({"state": "unblocked"}, False, "unblocked", "unblocked; the next cell rejoins"),
    ],
)
def test_ranks_in_trouble(fields: dict[str, Any], stopped: bool, state: str, words: str) -> None:
    """A lost rank says how it ended and has no heartbeat; one that a signal paused is told from one that is silent."""
    made = row(RankHealth(record(**fields), silent_seconds=8.0), None, ProcessUse(0.0, 1, stopped))
    assert (made["state"], made["words"]) == (state, words)
    assert made["silent"] == (None if state in ("lost", "starting") else 8.0)


@pytest.mark.parametrize(
    ("broken_by", "state", "words"),
    [
        ("failed", "failed", "failed; the next cell rejoins"),
        ("interrupted", "interrupted", "interrupted; the next cell rejoins"),
        ("rank 1", "unblocked", "unblocked because rank 1 failed; the next cell rejoins"),
    ],
)
def test_a_rank_that_failed_is_told_from_one_that_was_unblocked(broken_by: str, state: str, words: str) -> None:
    """Of two ranks whose groups were shut down, the one whose cell raised is the one that failed."""
    broken = record(state="unblocked", broken_by=broken_by)
    made = row(RankHealth(broken, silent_seconds=0.1))
    assert (made["state"], made["words"]) == (state, words)
    assert rank_rows([], [broken])[0]["state"] == cells_of(broken)["state"] == state


@pytest.mark.parametrize(("seconds", "state"), [(SILENT_SECONDS - 0.1, "running"), (SILENT_SECONDS + 0.1, "silent")])
def test_a_slow_answer_is_no_silence(seconds: float, state: str) -> None:
    """A rank that has not answered in time, but was heard of just before, is in the state that it told by itself."""
    health = RankHealth(record(state="silent"), silent_seconds=seconds)
    assert row(health, RankStatus(0, state="running"))["state"] == state


def test_columns_of_what_there_is() -> None:
    """Launched collectives that have not ended have a column as long as there are any. What a GPU rank answers is
    shown; where the driver tells nothing, there is no such column."""
    oldest = OldestFlight("all_reduce", number=18, bytes=4 << 20, seconds=3.2, bucket="")
    words = in_flight_words(InFlight(2, oldest))
    made = row(RankHealth.of(record(in_flight=words), None, 0.1))
    titles, (texts,) = row_texts([made])
    assert texts[titles.index("in flight")] == "2, oldest all_reduce #18 of 4 MiB for 3.2 s"
    assert "in flight" not in row_texts([row(RankHealth.of(record(), None, 0.1))])[0]
    answer = Health("idle", None, gpu=GpuUse(3 << 30, 24 << 30, 88))
    (texts,) = row_texts([row(RankHealth.of(record(device="cuda:0"), answer, 0.1))])[1]
    assert texts[3:5] == ["3 GiB of 24 GiB", "88 %"]
    silent = Health("idle", None, gpu=GpuUse(None, None, None))
    assert "GPU" not in row_texts([row(RankHealth.of(record(), silent, 0.1))])[0]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        wait_until(lambda: psutil.Process(process.pid).memory_info().rss > 1 << 20, "its begin")
        yield process
        process.kill()


def test_what_the_system_tells(sleeper: subprocess.Popen[bytes]) -> None:
    """Memory at once, processor share from the second look on, whether it is stopped; nothing of one that ended."""
    watch, ranks = ProcessWatch(), [record(pid=sleeper.pid), record(1, pid=sleeper.pid, host="elsewhere")]
    first = watch.look(ranks)
    assert set(first) == {0}
    assert first[0].cpu_percent is None
    own = psutil.Process(sleeper.pid)
    wait_until(lambda: ProcessWatch().look(ranks)[0].memory == own.memory_info().rss, "its memory")
    assert isinstance(watch.look(ranks)[0].cpu_percent, float)
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_until(lambda: watch.look(ranks)[0].stopped, "the stop")
    sleeper.kill()
    wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_ZOMBIE, "its end")
    assert watch.look(ranks) == {}
