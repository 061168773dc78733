"""`ddp-lab run` says which rank waits where, and for whom."""

from __future__ import annotations

import contextlib
import html
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab import Timeline
from ddp_lab.cli import main
from ddp_lab.timeline.timeline import read_run
from tests.waiting import DEADLINE_S, wait_until

SCRIPT = Path(__file__).with_name("hanging_script.py")
SECONDS = "3"
soak = pytest.mark.soak


def _command(folder: Path, case: str, *options: str) -> list[str]:
    ours = [sys.executable, "-m", "ddp_lab", "run", "--record", str(folder / "run")]
    ranks = "4" if case.startswith("mesh") else "2"
    return [*ours, "--hang-seconds", SECONDS, *options, "--standalone", "--nproc-per-node", ranks, str(SCRIPT), case]


def _run(folder: Path, case: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = _command(folder, case, *options)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _run_until_told(folder: Path, case: str, *files: str) -> subprocess.CompletedProcess[str]:
    """Runs a case whose ranks wait for one file after the other: each is there when the wait for it has been told."""
    command, told = _command(folder, case), [folder / "output", folder / "errors"]
    with told[0].open("w") as output, told[1].open("w") as errors:
        run = subprocess.Popen(command, cwd=folder, stdout=output, stderr=errors)
    for number, file in enumerate(files, 1):
        wait_until(
            lambda number=number: run.poll() is not None or told[1].read_text().count("no progress for") >= number,
            "a wait is told",
        )
        (folder / file).touch()
    return subprocess.CompletedProcess(command, run.wait(), *(one.read_text() for one in told))


def _line(text: str) -> int:
    """The number of the script's first line with this text."""
    return next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if text in line)


HANGS = [
    ("busy", ["rank 0 waits in the backward, for bucket 0 of Linear (", "rank 1 is in `time.sleep(late)` at"]),
    ("checkpoint", ["rank 1 waits in barrier", 'rank 0 is in `open("disk", "wb")`']),
    ("sharded", ["rank 0 waits in all_gather", "rank 1 is in `time.sleep(EVER)`"]),
    ("functional_call", ["rank 0 waits in all_reduce #1 (", "`time.sleep(EVER)`"]),
    ("objects", ["rank 0 waits in all_gather_object", "rank 1 is in `time.sleep(EVER)`"]),
    ("mesh", ["on mesh dimension dp (ranks 1, 3)", "rank 3 is in `time.sleep(EVER)`"]),
    ("queue_of_its_own", ["rank 0 waits in all_reduce #1", "queue"]),
    ("handle", ["rank 0 waits in all_reduce #1", "rank 1 is in `time.sleep(EVER)`"]),
    ("compiled", ["for bucket 0 of OptimizedModule", "`time.sleep(late)`"]),
]


@soak
@pytest.mark.parametrize(("case", "words"), HANGS)
def test_a_hang_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, words: list[str]) -> None:
    """In one sentence with the lines; `--on-hang stop` writes what every rank does, and ends the run."""
    done = _run(tmp_path, case, "--on-hang", "stop")
    assert done.returncode == 143, done.stderr
    _assert_told(done.stderr, words)
    _assert_kept([tmp_path / "run"], words[0], capsys)


def _assert_told(errors: str, words: list[str]) -> None:
    """Before what every rank does, and not once more at the end."""
    assert all(text in errors.partition("ddp-lab: what every rank does")[0] for text in words), errors
    assert "before the end" not in errors


def _assert_kept(runs: list[Path], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Files have the ranks' stacks; the reports' pages begin with the hang, and `ddp-lab report` prints it."""
    assert main.main(["report", *map(str, runs)]) == 0
    assert words in capsys.readouterr().out
    for run in runs:
        assert f"{SCRIPT}:{_line('globals()[sys.argv[1]]()')} in <module>" in (run / "hang-1.txt").read_text()
        assert html.unescape(words) in html.unescape((run / "report.html").read_text())


@soak
def test_a_late_rank_is_told_and_that_it_goes_on(tmp_path: Path) -> None:
    """A run that recovers ends well; before it hangs and after, nothing is said of it. Without a model the report, its
    page and the saved timeline have every collective by group."""
    done = _run_until_told(tmp_path, "late", "late")
    assert done.returncode == 0, done.stderr
    assert "Default group (ranks 0–1), gloo: " in done.stdout
    assert "nothing to report" not in done.stderr
    frame = Timeline.load(tmp_path / "run" / "timeline.npz").collectives()
    assert set(frame["operation"]) >= {"all_gather", "all_reduce", "send", "recv"}
    assert (frame["state"] == "complete").all()
    assert set(frame[frame["operation"] == "send"]["place"]) == {f"{SCRIPT}:{_line('dist.send(ones, 1)')}"}
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Collectives by group" in page
    assert "waiting for peers" in page
    told = done.stderr.partition("the ranks make progress again")
    assert f"rank 1 is in `time.sleep(0.1)` at {SCRIPT}:{_line('time.sleep(0.1)')}" in told[0]
    assert told[1], done.stderr
    assert done.stderr.count("no progress for") == 1, done.stderr
    assert not list((tmp_path / "run").glob("hang-*"))


@soak
def test_a_rank_that_compiles_is_no_hang(tmp_path: Path) -> None:
    """It is said once, at the user's line, and `--on-hang stop` does not end the run, which ends well."""
    command, errors = _command(tmp_path, "compiles", "--on-hang", "stop"), tmp_path / "errors"
    with errors.open("w") as file, subprocess.Popen(command, cwd=tmp_path, stderr=file) as run:
        wait_until(lambda: run.poll() is not None or "compiling" in errors.read_text(), "the wait is told")
        (tmp_path / "compiled").touch()
    said = errors.read_text()
    assert run.returncode == 0, said
    assert "ranks have waited for 3 s: rank 0 waits in all_reduce #1" in said
    assert "rank 1 is in `library[" in said
    assert said.count("rank 1 is compiling; the others continue when it is done") == 1
    assert "no progress" not in said


@soak
def test_no_watch(tmp_path: Path) -> None:
    """`--hang-seconds 0` turns it off."""
    (tmp_path / "late").touch()
    done = _run(tmp_path, "late", "--hang-seconds", "0")
    assert (done.returncode, "ddp-lab:" in done.stderr) == (0, False), done.stderr


def test_a_killed_rank(tmp_path: Path) -> None:
    """A rank that is late is told, and that it goes on; before and after nothing is said of it. One that shows no
    traceback is named with the line at which it was last seen, and how long ago, and keeps what it had recorded. Of a
    script with `fully_shard`, with no change of it, that are the steps of each parameter group, and the summary has
    their waits."""
    done = _run_until_told(tmp_path, "killed", "late", "killed")
    assert done.returncode == 1, done.stderr
    late, goes_on, later = done.stderr.partition("the ranks make progress again")
    assert f"rank 1 is in `time.sleep(0.1)` at {SCRIPT}:{_line('time.sleep(0.1)')}" in late
    assert goes_on
    assert (late.count("no progress for"), later.count("time.sleep(0.1)")) == (1, 0), done.stderr
    assert "was killed by SIGKILL, so torch's agent ended the run" in done.stderr
    seen = f" s ago: rank 1 is in `time.sleep(0.3)` at {SCRIPT}:{_line('time.sleep(0.3)')}"
    assert re.search(rf"last seen \d+\.\d{re.escape(seen)}", done.stderr), done.stderr
    assert "rank 1 ended early: killed by SIGKILL" in done.stderr
    timeline = read_run([tmp_path / "run"]).timeline
    assert {rank.rank: rank.state for rank in timeline.ranks()}[1] == "killed by SIGKILL"
    assert "Sequential on 2 ranks" in done.stdout
    assert "2 parameter groups; ranks wait" in done.stdout
    assert timeline.steps().groupby("rank").size().to_dict() == {0: 3, 1: 3}
    assert timeline.parameter_groups().groupby("module").size().to_dict() == {"0": 6, "2": 6}
    frame = timeline.collectives()
    reduced = frame[frame["operation"] == "reduce_scatter"]
    assert (set(reduced["module"]), set(reduced["use"])) == ({"0", "2"}, {"reduction"})
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    (drawn,) = re.findall(r">Timeline of step (\d+)<", page)
    assert f"Parameter groups: step {drawn}" in page


@soak
def test_a_timeout(tmp_path: Path) -> None:
    """When a group's timeout ends the run, the reason is said once more."""
    done = _run(tmp_path, "times_out")
    assert done.returncode == 1, done.stderr
    told = done.stderr.partition("before the end, ranks had waited for")
    assert "rank 0 waits in all_reduce #1 of 32 B (float32 [2, 4]) on short (ranks 0–1)" in told[2], done.stderr
    assert "rank 1 is in `time.sleep(EVER)`" in told[2]
    assert f"({SCRIPT}:" in done.stderr.partition("ended early: ")[2]


class _Nodes:
    """Two agents on this host with a rank each, as on two nodes."""

    def __init__(self, folder: Path, case: str, *options: str) -> None:
        with socket.socket() as one:
            one.bind(("localhost", 0))
            port = one.getsockname()[1]
        given = ["--hang-seconds", SECONDS, *options, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "job"]
        given += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", str(SCRIPT), case]
        self._errors = [folder / "errors-0", folder / "errors-1"]
        self.agents = []
        for errors in self._errors:
            command = [sys.executable, "-m", "ddp_lab", "run", "--record", f"{errors}-run", *given]
            with errors.open("w") as file:
                self.agents.append(
                    subprocess.Popen(
                        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True
                    )
                )

    def told(self) -> list[str]:
        """What each agent has said."""
        return [errors.read_text() for errors in self._errors]

    def __enter__(self) -> _Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGCONT)
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@soak
@pytest.mark.parametrize(
    ("case", "words"), [HANGS[0], ("calls", ["rank 0 entered all_reduce #1", "rank 1 broadcast #1", f"{SCRIPT}:"])]
)
def test_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, words: list[str]) -> None:
    """Each node's terminal shows it, and each agent stops. The report's page and `ddp-lab report` begin with it."""
    with _Nodes(tmp_path, case, "--on-hang", "stop") as nodes:
        assert [one.wait(DEADLINE_S) for one in nodes.agents] == [143, 143], nodes.told()
        for told in nodes.told():
            _assert_told(told, words)
            assert "torch's agent" not in told  # how a rank ended is a consequence
        _assert_kept([tmp_path / f"errors-{node}-run" for node in range(2)], words[0], capsys)


@soak
@pytest.mark.parametrize("case", ["ddp", "uneven", "sharded", "groups", "messages", "loader", "checkpoints"])
def test_healthy_runs_are_not_commented(tmp_path: Path, case: str) -> None:
    """Ranks that wait for each other for a moment, again and again, and for nothing longer than that."""
    script = SCRIPT.with_name("healthy_script.py")
    ours = [sys.executable, "-m", "ddp_lab", "run", "--record", str(tmp_path / "run"), "--hang-seconds", "4"]
    command = [*ours, "--standalone", "--nproc-per-node", "2", str(script), case]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    alarms = [line for line in done.stderr.splitlines() if "no progress" in line or "different calls" in line]
    assert (done.returncode, alarms) == (0, []), done.stderr
