"""`ddp-lab run`: scripts that know nothing of ddp_lab, under torch's agent, recorded and reported."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.metrics import api as metrics
from torch.distributed.elastic.multiprocessing.api import SignalException

import ddp_lab
from ddp_lab.cli import main
from ddp_lab.launch.agent import run_agent
from ddp_lab.protocol import journal
from ddp_lab.timeline.timeline import read_run
from tests.disks import small_disk
from tests.ranks.harness import ROOT
from tests.waiting import DEADLINE_S, wait_until

PROGRAMS = Path(__file__).parents[1] / "programs"
SCRIPT = str(PROGRAMS / "train_anything.py")
TWO = ["--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": ROOT, "ACCELERATE_USE_CPU": "true"}
ENVIRONMENT.pop("OMP_NUM_THREADS", None)


def _run(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `ddp-lab run` on two ranks, recorded in a folder; it must end with this exit code."""
    command = [sys.executable, "-m", "ddp_lab", "run", *TWO, "--record", str(folder), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr[-6000:] + done.stdout[-2000:]
    assert "OMP_NUM_THREADS" not in done.stderr  # torchrun's banner
    return done


def _steps(timeline: ddp_lab.Timeline) -> dict[tuple[int, int], int]:
    """(rank, reducer) -> how many of its steps are complete."""
    steps = timeline.steps()
    complete = steps[steps["state"] == "complete"]
    return {key: len(rows) for key, rows in complete.groupby(["rank", "reducer"])}


@pytest.mark.soak
def test_workers_that_are_spawned_find_the_script(tmp_path: Path) -> None:
    """Classes of the script can be pickled into spawned data loader workers, which record nothing."""
    _run(tmp_path / "run", SCRIPT, "workers", "8")
    assert len(list((tmp_path / "run").glob(f"*{journal.SUFFIX}"))) == 2


def test_an_exception_keeps_what_was_recorded(tmp_path: Path) -> None:
    """When a rank raises, its traceback begins at the user's file; all steps before it are in the timeline, also of
    torch's class where it is observed, and a notice says which rank and why."""
    page = tmp_path / "elsewhere" / "page.html"
    done = _run(tmp_path / "run", "--observe", "--report", str(page), SCRIPT, "raises", "500", code=1)
    assert "rank 1 ended early: RuntimeError: the data is broken" in done.stderr
    assert 'raise RuntimeError("the data is broken")' in done.stderr
    assert f'[rank1]: Traceback (most recent call last):\n[rank1]:   File "{SCRIPT}", line' in done.stderr
    assert "ddp_lab/launch" not in done.stderr
    assert "ended with exit code 1, so torch's agent ended the run" in done.stderr
    assert len(done.stderr.splitlines()) < 25
    assert page.is_file()
    steps = _steps(ddp_lab.Timeline.load(tmp_path / "run" / "timeline.npz"))
    assert set(steps) == {(0, 0), (1, 0)}
    assert steps[1, 0] == 6
    assert steps[0, 0] >= 6


_SAVES = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, other = dist.get_rank(), torch.tensor([os.getpid()])
dist.broadcast(other, 1)
torch.manual_seed(0)
layers = [torch.nn.Linear(16, 16) for _ in range(8)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
for _ in range(int(sys.argv[2])):
    model(torch.ones(4, 16)).sum().backward()
dist.destroy_process_group()
if rank == 0:
    while os.path.exists(f"/proc/{other.item()}"):  # until torch's agent has noticed
        time.sleep(0.05)
    torch.save(model.module.state_dict(), sys.argv[1])
"""


def _trains_and_saves(folder: Path, steps: int = 20) -> list[str]:
    """A script that saves a checkpoint after the other rank has ended, and its arguments."""
    script = folder / "saves.py"
    script.write_text(_SAVES)
    return [str(script), str(folder / "checkpoint.pt"), str(steps)]


@pytest.mark.soak
def test_a_full_disk_harms_no_training(tmp_path: Path) -> None:
    """On a disk of 1 MB for the record a training ends well, saves its checkpoint and exits 0; each rank says one line
    and the report, elsewhere, what there is and how much is missing."""
    with small_disk(tmp_path / "small") as folder:
        page = tmp_path / "page.html"
        done = _run(folder / "run", "--report", str(page), *_trains_and_saves(tmp_path, 600))
        assert (tmp_path / "checkpoint.pt").stat().st_size > 8_000
        assert done.stderr.count("can't write its journal") == 2
        assert done.stderr.count("events of rank 0 could not be recorded: No space left on device") == 1
        assert f"can't write {folder / 'run' / 'timeline.npz'}: No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        assert "ended early" not in done.stderr
        assert "Sequential on 2 ranks" in done.stdout
        assert "events were dropped" in done.stdout
        assert page.stat().st_size > 10_000
        assert sorted(path.name for path in (folder / "run").iterdir()) == ["rank0.journal", "rank1.journal"]
        assert min(_steps(read_run([folder / "run"]).timeline).values()) > 50


@pytest.mark.soak
@pytest.mark.parametrize("what", ["stdout", "stdout and stderr"])
def test_output_that_nobody_takes_harms_no_training(tmp_path: Path, what: str) -> None:
    """The exit code is the program's, and so is the checkpoint."""
    with contextlib.ExitStack() as stack:
        taken = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        taken |= {name: stack.enter_context(open("/dev/full", "w")) for name in what.split(" and ")}
        command = [sys.executable, "-m", "ddp_lab", "run", *TWO, "--record", str(tmp_path / "run")]
        done = subprocess.run(
            [*command, *_trains_and_saves(tmp_path)], env=ENVIRONMENT, **taken, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "checkpoint.pt").stat().st_size > 8_000
        if done.stderr is not None:
            assert "Traceback" not in done.stderr
            assert "can't write its journal" not in done.stderr
            assert "can't write to stdout: No space left on device" in done.stderr


@pytest.mark.soak
def test_scripts_with_two_models_and_with_none(tmp_path: Path) -> None:
    """Each model is reported; of a script without one, the collectives of its groups are."""
    done = _run(tmp_path / "two", SCRIPT, "two models", "4")
    assert _steps(read_run([tmp_path / "two"]).timeline) == {(r, m): 4 for r in range(2) for m in range(2)}
    assert done.stdout.count("Sequential") >= 2
    done = _run(tmp_path / "none", SCRIPT, "no model", "4")
    assert "Default group (ranks 0–1), gloo: 1 barrier" in done.stdout
    assert (tmp_path / "none" / "report.html").exists()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that trains until it is stopped, served, in ``tmp_path / "run"``; its rank 1 stops once there is
    ``tmp_path / "hang"``."""
    options = [*TWO, "--serve", "--hang-seconds", "3", "--record", str(tmp_path / "run")]
    command = [sys.executable, "-m", "ddp_lab", "run", *options, SCRIPT, "endless", "100000000"]
    environment = {**ENVIRONMENT, "HANG": str(tmp_path / "hang")}
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        wait_until(lambda: process.poll() is not None or _recorded(tmp_path / "run") > 20_000, "the first steps")
        assert process.poll() is None, (tmp_path / "errors").read_text()
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)


def _recorded(folder: Path) -> int:
    """Bytes of the shorter of both ranks' journals; 0 if there is none."""
    journals = [journal.path_of(folder, rank) for rank in range(2)]
    return min(path.stat().st_size if path.exists() else 0 for path in journals)


def test_ranks_end_with_an_agent_that_is_killed(running: subprocess.Popen[str], tmp_path: Path) -> None:
    """An agent that is killed leaves no rank behind, and what they had recorded can be read."""
    ranks = psutil.Process(running.pid).children(recursive=True)
    assert len(ranks) >= 2
    running.kill()
    _, alive = psutil.wait_procs(ranks, DEADLINE_S)
    assert not alive
    running.communicate(timeout=DEADLINE_S)
    assert "the agent (process" in (tmp_path / "errors").read_text()
    timeline = read_run([tmp_path / "run"]).timeline
    assert min(_steps(timeline).values()) > 1


def test_a_running_job_can_be_followed_and_interrupted(running: subprocess.Popen[str], tmp_path: Path) -> None:
    """attach() shows steps as they are made, from the folder and over the port, and only with the token. What is
    recorded is the user's alone: the folder has mode 0700, its journals and the invitation 0600. Ctrl-C ends
    the ranks of a run that hangs, with the reason last; the report is written all the same, and the exit code is a
    shell's for it."""
    invitation = json.loads((tmp_path / "run" / "attach.json").read_text())
    folder = tmp_path / "run"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"run": 0o700, "attach.json": 0o600, "rank0.journal": 0o600, "rank1.journal": 0o600}
    for arguments in ([str(tmp_path / "run")], [invitation["address"], invitation["token"]]):
        with ddp_lab.follow(*arguments) as job:
            before = {rank.rank: rank.step for rank in job.timeline.ranks()}

            def goes_on(job: Any = job, before: dict[int, int] = before) -> bool:
                job.check()
                return all(rank.step > before.get(rank.rank, 0) + 20 for rank in job.timeline.ranks())

            wait_until(goes_on, "more steps")
            assert {rank.state for rank in job.timeline.ranks()} == {"running"}
            assert "Sequential" in job.timeline.summary()
            assert job.following
        assert not job.following
    other = invitation["token"][:60] + invitation["token"][60:][::-1]
    with pytest.raises((ConnectionError, ValueError)):
        ddp_lab.follow(invitation["address"], other)
    with pytest.raises(ValueError, match=r"attach\.json"):
        ddp_lab.follow(invitation["address"])
    with pytest.raises(FileNotFoundError, match="neither the folder of a run nor HOST:PORT"):
        ddp_lab.follow("nowhere")

    errors = tmp_path / "errors"
    assert "no progress for" not in errors.read_text()
    (tmp_path / "hang").touch()
    wait_until(lambda: "no progress for" in errors.read_text(), "the hang is told")
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 130, errors.read_text()
    assert "before the end, ranks had waited for" in errors.read_text()
    assert "rank 1 failed" not in errors.read_text()
    assert "wrote" in out
    assert (tmp_path / "run" / "report.html").is_file()
    timeline = ddp_lab.Timeline.load(tmp_path / "run" / "timeline.npz")
    assert min(_steps(timeline).values()) > 1


def test_an_interrupt_in_torchs_own_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes just as torch begins to time its agent's function is a Ctrl-C all the same."""

    def interrupted() -> float:
        raise SignalException("interrupted", signal.SIGINT)

    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=interrupted))
    monkeypatch.setattr("torch.distributed.run.run", metrics.prof(lambda given: None))
    assert run_agent(argparse.Namespace()) == 130


@pytest.mark.soak
def test_a_module_of_a_package(tmp_path: Path) -> None:
    """`--module` runs a script from Hugging Face accelerate's wheel; it passes, and is recorded on both ranks."""
    pytest.importorskip("accelerate")
    _run(tmp_path / "run", "--module", "accelerate.test_utils.scripts.test_sync")
    assert {rank for rank, _ in _steps(read_run([tmp_path / "run"]).timeline)} == {0, 1}


def test_what_cannot_be_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that is no Python, a folder that is taken and an address of others are errors of one line."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "taken"
    folder.mkdir()
    journal.path_of(folder, 0).write_bytes(journal.MAGIC)
    for arguments, message in (
        (["--no-python", "ls"], "--no-python is not supported: only Python programs"),
        (["--record", str(folder), SCRIPT], "contains the journals of another run"),
        (["--record", str(tmp_path / "new"), "--serve", "192.0.2.1", SCRIPT], "--serve 192.0.2.1: can't listen there"),
    ):
        assert main.main(["run", *TWO, *arguments]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert list(tmp_path.iterdir()) == [folder]  # no folder is made for what does not begin


def test_a_script_with_a_syntax_error_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its place is shown as Python does, then one sentence; no rank is started, and there is no folder."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("import os\nfor x in 3\n")
    assert main.main(["run", *TWO, "s.py"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith('  File "s.py", line 2\n    for x in 3\n')
    assert said.err.splitlines()[-1] == "ddp-lab: s.py can't be compiled, so no rank was started"
    assert len(said.err.splitlines()) == 5
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["s.py"]


# Each with a word that tells what is wrong.
WRONG = [
    ([], "SCRIPT"),
    (["--frob", "s.py"], "'--frob'"),
    (["--nproc-per-node", "x", "s.py"], "argument --nproc-per-node: "),
    (["--nproc-per-node", "0", "s.py"], "'0' is not a number of ranks"),
    (["--nproc-per-node", "-1", "s.py"], "--nproc-per-node"),
    (["--nnodes", "x", "s.py"], "'x' is not a number of hosts"),
    (["--nnodes", "3:2", "s.py"], "'3:2' is not a number of hosts"),
    (["--nnodes", "1:2:3", "s.py"], "'1:2:3' is not a number of hosts"),
    (["--max-restarts", "x", "s.py"], "--max-restarts"),
    (["--max-restarts", "-1", "s.py"], "max_restarts must be >= 0"),
    (["--redirects", "x", "s.py"], "torchrun refuses its options"),
    (["--rdzv-conf", "x", "s.py"], "torchrun refuses its options"),
    (["--local-ranks-filter", "x", "s.py"], "torchrun refuses its options"),
    (["--start-method", "x", "s.py"], "--start-method"),
    (["s.py"], "the script 's.py' does not exist"),
    (["empty"], "the script 'empty' does not exist"),
]
OURS = [
    ("run", ["--record", "file", "file"], "file is not a folder"),
    ("run", ["--report", "empty", "file"], "empty is a folder"),
    ("run", ["--serve", "a:b", "file"], "'a:b' does not have the form HOST or HOST:PORT"),
    ("run", ["--serve", "file"], "'file' is a file"),
    ("run", ["--serve=127.0.0.1:99999", "file"], "does not have the form HOST or HOST:PORT"),
    ("run", ["--serve=203.0.113.7", "file"], "--serve 203.0.113.7: "),
    ("run", ["--rdzv-backend", "pigeon", "--rdzv-endpoint", "localhost:1", "file"], "agent could not run the ranks: "),
    ("tune", ["--seconds", "abc", "file"], "'abc' is not a time in seconds"),
    ("tune", ["--steps", "0", "file"], "'0' is not a whole number of at least 1"),
    ("tune", ["--json", "empty", "file"], "empty is a folder"),
    ("tune", ["--nnodes", "2", "file"], "only programs on one host can be tuned"),
]


def test_wrong_options_are_told_in_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours and torchrun's, of run and tune: named in at most two lines, with an exit code, before a folder is made."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("import time")
    (tmp_path / "empty").mkdir()
    cases = [(command, arguments, words) for command in ("run", "tune") for arguments, words in WRONG]
    for command, arguments, words in [*cases, *OURS]:
        try:
            code = main.main([command, *arguments])
        except SystemExit as end:
            code = int(str(end.code))
        said = capsys.readouterr().err
        assert code in (1, 2), (command, arguments)
        assert words in said, (command, arguments, said)
        assert said.count("\n") <= 2, (command, arguments, said)
        assert said.startswith("ddp-lab"), (command, arguments, said)
        assert sorted(os.listdir()) == ["empty", "file"], (command, arguments)


@pytest.mark.parametrize("command", ["run", "tune"])
def test_own_options_come_first_in_the_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The help has our options, says how to see torchrun's, and ends with two examples; the other shows torchrun's."""
    for option, shown in (("--help", False), ("--help-torchrun", True)):
        with pytest.raises(SystemExit) as end:
            main.main([command, option])
        assert end.value.code == 0
        said = capsys.readouterr().out
        assert ("--rdzv-backend" in said) is shown
        assert ("ddp_lab's options:" in said) is not shown
        examples = said.partition("examples:\n")[2].splitlines()
        assert [one.split()[:2] for one in examples] == ([] if shown else [["ddp-lab", command]] * 2)
