"""Ctrl-C and SIGTERM end `ddp-lab run` whose ranks wait in collectives: they get what they would get elsewhere."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import leftovers
from tests.waiting import DEADLINE_S, wait_until

SCRIPT = Path(__file__).with_name("hanging_script.py")
_TOLD = "ddp-lab: (no progress|the ranks make different calls)"
soak = pytest.mark.soak
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a case and waits until its hang is told; what it prints is in the file "errors"."""
    runs: list[subprocess.Popen[str]] = []

    def begin(case: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ddp_lab", "run", "--record", str(tmp_path / "run"), "--hang-seconds", "1"]
        command += [*options, "--standalone", "--nproc-per-node", "2", str(SCRIPT), case]
        with (tmp_path / "errors").open("w") as errors:
            run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True)
        runs.append(run)
        wait_until(lambda: run.poll() is not None or re.search(_TOLD, _errors(tmp_path)), "the hang is told")
        return run

    yield begin
    for run in runs:
        with run:
            run.kill()


def _errors(folder: Path) -> str:
    return (folder / "errors").read_text()


def _line(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if text in line)


@soak
@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("left_early", ["model(ones).sum().backward()", "dist.barrier()"]),
        ("messages", ["dist.recv(ones, 1 - rank)"]),
        ("one_makes_a_group", []),
        ("handle", ["work.wait()"]),
    ],
)
def test_ctrl_c_reaches_a_rank_in_a_collective(tmp_path: Path, start: Start, case: str, lines: list[str]) -> None:
    """Each rank gets its KeyboardInterrupt at the line that waited, and says nothing of the connection that was shut
    down for that; nobody is killed, and the report is written."""
    run = start(case)
    told = len(_errors(tmp_path))
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=DEADLINE_S)
    said = _errors(tmp_path)[told:]
    assert run.returncode == 130, said
    ends = {f"ddp-lab: rank {rank} ended early: interrupted" for rank in (0, 1)}
    assert {line for line in said.splitlines() if "ended early" in line} == ends, said
    assert said.count("KeyboardInterrupt") == 2, said
    assert not re.search(r"(?m)^\[rank\d\]: \w*Error", said), said
    for line in lines:
        assert f"    {line}\n" in said
    assert (tmp_path / "run" / "report.html").is_file() or case == "one_makes_a_group"


@soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    """A rank that ends for no signal is killed, not waited for, and the report is written."""
    run = start("deaf")
    run.send_signal(number)
    wait_until(lambda: "closing signal" in _errors(tmp_path), "the ranks are told")
    run.send_signal(number)
    run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 128 + number
    assert "which had not ended yet" in _errors(tmp_path)
    assert "death signal, shutting down workers" in _errors(tmp_path)
    assert "Unable to shutdown process" not in _errors(tmp_path), "torch's agent waited for half a minute"
    assert (tmp_path / "run" / "report.html").is_file()
    assert not [command for command in leftovers.processes().values() if str(SCRIPT) in command]


@soak
def test_a_handler_of_sigterm_runs_in_a_collective(tmp_path: Path, start: Start) -> None:
    """What a program does when Slurm or Kubernetes ends it is done, also where its ranks wait for each other."""
    run = start("graceful")
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=DEADLINE_S)
    assert {"rank 0 saved", "rank 1 saved"} <= set(said.splitlines()), _errors(tmp_path)
    assert run.returncode == 143
