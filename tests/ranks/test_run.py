"""`ddp-lab run`: scripts that know nothing of ddp_lab, under torch's agent, recorded and reported."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import ddp_lab
from ddp_lab import cli, journal
from ddp_lab.client.recorded_runs import read_run
from tests.ranks.harness import ROOT

PROGRAMS = Path(__file__).parent / "programs"
SCRIPT = str(PROGRAMS / "train_anything.py")
TWO = ["--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def _run(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `ddp-lab run` on two ranks, recorded in a folder; it must end with this exit code."""
    command = [sys.executable, "-m", "ddp_lab", "run", *TWO, "--record", str(folder), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stderr[-6000:] + done.stdout[-2000:]
    return done


def _printed(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("weights:")]
    return line


def _steps(timeline: ddp_lab.Timeline) -> dict[tuple[int, int], int]:
    """(rank, reducer) -> how many of its steps are complete."""
    steps = timeline.steps()
    complete = steps[steps["state"] == "complete"]
    return {key: len(rows) for key, rows in complete.groupby(["rank", "reducer"])}


def test_a_script_trains_as_under_torchrun_and_is_recorded(tmp_path: Path) -> None:
    """Same weights, names and arguments as under torchrun, with ours and observed; all steps of all ranks, a page."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", *TWO, SCRIPT, "plain", "8"]
    plain = subprocess.run(torchrun, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=True)
    for name, options in (("ours", []), ("observed", ["--observe"])):
        done = _run(tmp_path / name, *options, SCRIPT, "plain", "8")
        assert _printed(done) == _printed(plain)
        assert "as __main__ train_anything.py ['plain', '8']" in _printed(done)
        assert "Sequential on 2 ranks" in done.stdout
        timeline = ddp_lab.Timeline.load(tmp_path / name / "timeline.npz")
        assert _steps(timeline) == {(0, 0): 8, (1, 0): 8}
        page = (tmp_path / name / "report.html").read_text(encoding="utf-8")
        assert "<html" in page
        assert len(page) > 10_000


@pytest.mark.soak
def test_workers_that_are_spawned_find_the_script(tmp_path: Path) -> None:
    """Classes of the script can be pickled into spawned data loader workers, which record nothing."""
    _run(tmp_path / "run", SCRIPT, "workers", "8")
    assert len(list((tmp_path / "run").glob(f"*{journal.SUFFIX}"))) == 2


def test_an_exception_keeps_what_was_recorded(tmp_path: Path) -> None:
    """When a rank raises, all steps before it are in the timeline, and a notice says which rank and why."""
    page = tmp_path / "elsewhere" / "page.html"
    done = _run(tmp_path / "run", "--report", str(page), SCRIPT, "raises", "500", code=1)
    assert "rank 1 ended early: RuntimeError: the data is broken" in done.stderr
    assert 'raise RuntimeError("the data is broken")' in done.stderr
    assert page.is_file()
    steps = _steps(ddp_lab.Timeline.load(tmp_path / "run" / "timeline.npz"))
    assert set(steps) == {(0, 0), (1, 0)}
    assert steps[1, 0] == 6
    assert steps[0, 0] >= 6


def test_a_rank_that_is_killed_keeps_what_it_had_recorded(tmp_path: Path) -> None:
    """A rank that the kernel ends at once loses what was not written yet, 20 ms of it, and the notice says killed."""
    done = _run(tmp_path / "run", "--observe", SCRIPT, "dies", "500", code=1)
    assert "rank 1 ended early: killed" in done.stderr
    run = read_run([tmp_path / "run"])
    assert {rank.rank: rank.state for rank in run.timeline.ranks()}[1] == "killed"
    assert run.timeline.reducers()


def test_restarted_ranks_are_one_run(tmp_path: Path) -> None:
    """With --max-restarts both lives of each rank are in the report; models of the second are new ones."""
    _run(tmp_path / "run", "--max-restarts", "1", SCRIPT, "restarts", "8")
    assert len(list((tmp_path / "run").glob(f"*{journal.SUFFIX}"))) == 4
    steps = _steps(read_run([tmp_path / "run"]).timeline)
    assert steps[1, 0] == 6
    assert (steps[0, 1], steps[1, 1]) == (8, 8)


@pytest.mark.soak
def test_scripts_with_two_models_and_with_none(tmp_path: Path) -> None:
    """Each model is reported; a script without one is told so, and keeps its exit code."""
    done = _run(tmp_path / "two", SCRIPT, "two models", "4")
    assert _steps(read_run([tmp_path / "two"]).timeline) == {(r, m): 4 for r in range(2) for m in range(2)}
    assert done.stdout.count("Sequential") >= 2
    done = _run(tmp_path / "none", SCRIPT, "no model", "4")
    assert "no DistributedDataParallel was built" in done.stderr
    assert not (tmp_path / "none" / "report.html").exists()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that trains until it is stopped, served, in ``tmp_path / "run"``."""
    command = [sys.executable, "-m", "ddp_lab", "run", *TWO, "--serve", "--record", str(tmp_path / "run"), SCRIPT]
    process = subprocess.Popen(
        [*command, "endless", "100000000"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 200
        while not all(path.stat().st_size > 20_000 for path in _journals(tmp_path / "run")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "nothing was recorded"
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _journals(folder: Path) -> list[Path]:
    return [journal.path_of(folder, rank) for rank in range(2)] if _both_began(folder) else [Path(os.devnull)]


def _both_began(folder: Path) -> bool:
    return all(journal.path_of(folder, rank).exists() for rank in range(2))


def test_ranks_end_with_an_agent_that_is_killed(running: subprocess.Popen[str], tmp_path: Path) -> None:
    """An agent that is killed leaves no rank behind, and what they had recorded can be read."""
    ranks = psutil.Process(running.pid).children(recursive=True)
    assert len(ranks) >= 2
    running.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    _, err = running.communicate(timeout=60)
    assert "the agent (process" in err
    timeline = read_run([tmp_path / "run"]).timeline
    assert min(_steps(timeline).values()) > 10


def test_a_running_job_can_be_followed_and_interrupted(running: subprocess.Popen[str], tmp_path: Path) -> None:
    """attach() shows steps as they are made, from the folder and over the port, and only with the token. Ctrl-C ends
    the ranks; the report is written all the same, and the exit code is a shell's for it."""
    invitation = json.loads((tmp_path / "run" / "attach.json").read_text())
    assert stat.S_IMODE((tmp_path / "run" / "attach.json").stat().st_mode) == 0o600
    for arguments in ([str(tmp_path / "run")], [invitation["address"], invitation["token"]]):
        with ddp_lab.attach(*arguments) as job:
            before = {rank.rank: rank.step for rank in job.timeline.ranks()}
            deadline = time.monotonic() + 60
            while not all(rank.step > before.get(rank.rank, 0) + 20 for rank in job.timeline.ranks()):
                job.check()
                assert time.monotonic() < deadline, "no step came"
                time.sleep(0.05)
            assert {rank.state for rank in job.timeline.ranks()} == {"running"}
            assert "Sequential" in job.timeline.summary()
            assert job.following
        assert not job.following
    other = invitation["token"][:60] + invitation["token"][60:][::-1]
    with pytest.raises((ConnectionError, ValueError)):
        ddp_lab.attach(invitation["address"], other)
    with pytest.raises(ValueError, match=r"attach\.json"):
        ddp_lab.attach(invitation["address"])
    with pytest.raises(FileNotFoundError, match="neither the folder of a run nor HOST:PORT"):
        ddp_lab.attach("nowhere")

    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert "wrote" in out
    assert (tmp_path / "run" / "report.html").is_file()
    timeline = ddp_lab.Timeline.load(tmp_path / "run" / "timeline.npz")
    assert min(_steps(timeline).values()) > 10


LONG = pytest.mark.soak
ACCELERATES = [pytest.param(name, marks=LONG) for name in ("test_sync", "test_script")]
OURS, OBSERVED, OBSERVED_LONG = (
    pytest.param(False, id="ours"),
    pytest.param(True, id="observed"),
    pytest.param(True, id="observed", marks=LONG),
)


@pytest.mark.parametrize("observe", [OURS, OBSERVED_LONG])
@pytest.mark.parametrize("name", ACCELERATES)
def test_accelerates_own_scripts(tmp_path: Path, name: str, observe: bool) -> None:
    """Scripts from Hugging Face accelerate's wheel pass, with our class and with torch's observed, and are recorded."""
    pytest.importorskip("accelerate")
    options = ["--observe"] if observe else []
    _run(tmp_path / "run", *options, "--module", f"accelerate.test_utils.scripts.{name}")
    run = read_run([tmp_path / "run"])
    assert run.timeline.reducers()
    assert all(len(rank_steps) for _, rank_steps in run.timeline.steps().groupby("rank"))


@pytest.mark.soak
@pytest.mark.parametrize("observe", [OURS, OBSERVED])
def test_lightnings_own_model(tmp_path: Path, observe: bool) -> None:
    """Lightning's demo model and data, trained by its Trainer, are recorded: 8 steps on each rank."""
    pytest.importorskip("lightning")
    options = ["--observe"] if observe else []
    _run(tmp_path / "run", *options, str(PROGRAMS / "boring_lightning.py"))
    assert set(_steps(read_run([tmp_path / "run"]).timeline).values()) == {8}


def test_what_cannot_be_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing script, a program that is no Python, and a folder that is taken are errors of one line."""
    folder = tmp_path / "taken"
    folder.mkdir()
    journal.path_of(folder, 0).write_bytes(journal.MAGIC)
    nowhere = [sys.executable, "-m", "ddp_lab", "run", *TWO, "nowhere.py"]
    done = subprocess.run(nowhere, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no script 'nowhere.py'" in done.stderr
    assert "Traceback" not in done.stderr
    for arguments, message in (
        (["--no-python", "ls"], "--no-python: only Python programs"),
        (["--record", str(folder), SCRIPT], "holds the journals of another run"),
    ):
        assert cli.main(["run", *TWO, *arguments]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert list(tmp_path.iterdir()) == [folder]  # no folder is made for what does not begin
