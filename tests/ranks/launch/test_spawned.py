"""`ddp-lab run` explains hangs and ends of ranks that the script starts itself as those of ranks of torch's agent."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests import leftovers
from tests.waiting import DEADLINE_S, wait_until

SCRIPT = Path(__file__).with_name("hanging_children.py")
soak = pytest.mark.soak


def _at(function: str, text: str) -> str:
    """File and line of the first such line in a function of the script."""
    lines = SCRIPT.read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(f"def {function}("))
    return f"{SCRIPT}:{next(at for at in range(first, len(lines)) if text in lines[at]) + 1}"


CALLS = [
    f"the ranks make different calls: rank 0 entered all_reduce #4 of 32 B (float32 [2, 4]) at "
    f"{_at('calls', 'dist.all_reduce')}, rank 1 broadcast #4 of 32 B (float32 [2, 4]) at "
    f"{_at('calls', 'dist.broadcast')}."
]
ASLEEP = [
    f"rank 0 waits in barrier #4 ({_at('asleep', 'dist.barrier')}); rank 1 is in `time.sleep(EVER)` at "
    f"{_at('asleep', 'time.sleep')}."
]
NEVER_JOINS = [
    f"no progress for 2 s: rank 0 waits in init_process_group at {_at('worker', 'dist.init_process_group')}; "
    "no process on this host has joined as rank 1; process ",
    f" is in `time.sleep(EVER)` at {_at('worker', 'time.sleep')}.",
    "there is no file of rank 1, which belongs to the run",
]
LAST = f"its last collective: all_reduce #3 of 32 B (float32) at {_at('worker', 'dist.all_reduce')}"
KILLED = [
    f"rank 1 was killed by SIGKILL ({LAST}); rank 0 then waited in barrier #4 at {_at('killed', 'dist.barrier')}.",
    "ddp-lab: the script (process ",
    "ddp-lab: rank 1 ended early: killed by SIGKILL",
]
RETURNS = [
    f"rank 1 had finished the program ({LAST}) without entering barrier #4 at {_at('returns', 'dist.barrier')}, in "
    "which rank 0 waited for it."
]


def _command(folder: Path, *case: str, options: tuple[str, ...] = ()) -> list[str]:
    ours = [sys.executable, "-m", "ddp_lab", "run", "--record", str(folder / "run"), "--hang-seconds", "2"]
    return [*ours, *options, str(SCRIPT), *case]


def _run(folder: Path, *case: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = _command(folder, *case, options=options)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    _assert_nobody_is_left()
    return done


def _assert_nobody_is_left() -> None:
    assert not [command for command in leftovers.processes().values() if str(SCRIPT) in command]


@contextmanager
def _hanging(folder: Path, *case: str, told: tuple[str, ...] = ("no progress",)) -> Iterator[subprocess.Popen[str]]:
    """Inside the block, the hang of this case has been told; at its end the run has ended, and all its processes."""
    with (folder / "errors").open("w") as errors:
        run = subprocess.Popen(_command(folder, *case), cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True)
    with run:
        try:
            wait_until(
                lambda: run.poll() is not None or all(words in _errors(folder) for words in told), "the hang is told"
            )
            children = psutil.Process(run.pid).children(recursive=True)
            yield run
            run.communicate(timeout=DEADLINE_S)
        finally:
            run.kill()
    wait_until(lambda: not any(_lives(one) for one in children), lambda: _errors(folder))


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _errors(folder: Path) -> str:
    return (folder / "errors").read_text()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("fork", "asleep", "shm"), ASLEEP),
        (("mp.spawn", "never_joins", "gloo"), NEVER_JOINS),
        pytest.param(("mp.spawn", "calls", "gloo"), CALLS, marks=soak),
        pytest.param(("fork", "never_joins", "shm"), NEVER_JOINS, marks=soak),
        pytest.param(("forkserver", "asleep", "gloo"), ASLEEP, marks=soak),
        pytest.param(("fork", "again", "gloo"), ASLEEP, marks=soak),
    ],
)
def test_a_hang_is_explained(tmp_path: Path, case: tuple[str, str, str], words: list[str]) -> None:
    """With rank, collective and line, once, also where the script has started ranks before that are gone; the run is
    stopped, and no process is left."""
    done = _run(tmp_path, *case, options=("--on-hang", "stop"))
    assert done.returncode == 143, done.stderr
    assert all(done.stderr.count(text) == 1 for text in words), done.stderr
    assert "before the end" not in done.stderr
    assert f"{SCRIPT}:" in (tmp_path / "run" / "hang-1.txt").read_text()


@soak
@pytest.mark.parametrize("how", ["fork", "forkserver"])
def test_a_rank_that_imports_before_it_joins(tmp_path: Path, how: str) -> None:
    """Is no hang: it is said once if the rank does so itself, and not at all while it imports the script."""
    (tmp_path / "slow.py").write_text("import time\n\ntime.sleep(8)\n")
    done = _run(tmp_path, how, "imports", "gloo", options=("--on-hang", "stop"))
    assert done.returncode == 0, done.stderr
    assert "no progress" not in done.stderr
    words = (
        r"ranks have waited for \d+ s: rank 0 waits in init_process_group .*; no process on this host has joined as "
    )
    words += r"rank 1; process \d+ is in `time.sleep\(8\)` at .*slow.py:3\."
    assert len(re.findall(words, done.stderr)) == (how == "fork"), done.stderr


def test_two_jobs_at_once_are_told_apart(tmp_path: Path) -> None:
    """Their ranks have the same numbers: each sentence is of one job, and says of which."""
    with _hanging(tmp_path, "fork", "two jobs", "gloo", told=("no progress", "different calls")) as run:
        run.send_signal(signal.SIGTERM)
    lines = _errors(tmp_path).splitlines()
    said = [line for line in lines if "the job whose ranks meet at" in line and "before the end" not in line]
    of_jobs = {line.partition(": ")[2].partition("): ")[0] for line in said}
    assert len(of_jobs) == 2, said
    for words in (*ASLEEP, *CALLS):
        assert sum(words in line for line in said) == 1, said
    files = {path.name for path in (tmp_path / "run").glob("*.child.journal")}
    assert files == {f"rank{rank}{again}.child.journal" for rank in range(2) for again in ("", ".restart1")}


def test_a_killed_rank_was_last_seen(tmp_path: Path) -> None:
    """At a line, and how long ago: the script shows no traceback of it."""
    with _hanging(tmp_path, "fork", "killed_late", "gloo"):
        (tmp_path / "told").touch()
    seen = rf"last seen \d+\.\d s ago: rank 1 is in `time.sleep\(0.1\)` at {_at('killed_late', 'time.sleep')}"
    assert re.search(seen, _errors(tmp_path)), _errors(tmp_path)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("fork", "killed", "gloo"), KILLED),
        pytest.param(("mp.spawn", "returns", "shm"), RETURNS, marks=soak),
        pytest.param(("mp.spawn", "killed", "shm"), KILLED, marks=soak),
    ],
)
def test_an_end_is_explained(tmp_path: Path, case: tuple[str, str, str], words: list[str]) -> None:
    """By the last collective of the rank that ended first, and by how it did, which only the script knows."""
    done = _run(tmp_path, *case)
    assert done.returncode == 1, done.stderr
    assert [one for one in words if one not in done.stderr] == [], done.stderr


@soak
@pytest.mark.parametrize(
    ("case", "number", "code"),
    [(("mp.spawn", "asleep", "shm"), signal.SIGINT, 130), (("fork", "deaf", "gloo"), signal.SIGTERM, 143)],
)
def test_a_signal_ends_all(tmp_path: Path, case: tuple[str, str, str], number: signal.Signals, code: int) -> None:
    """Also a rank that waits in a collective, or ends for no signal; Ctrl-C as a KeyboardInterrupt at that line."""
    with _hanging(tmp_path, *case) as run:
        run.send_signal(number)
    said = _errors(tmp_path)
    assert run.returncode == code, said
    assert said.count("ended early: interrupted") == (2 if number == signal.SIGINT else 0), said
    assert (tmp_path / "run" / "report.html").is_file()


@soak
@pytest.mark.parametrize("killed", ["script", "agent"])
def test_ranks_end_with_the_script(tmp_path: Path, killed: str) -> None:
    """Killed, or left by an agent that was, it can't end them."""
    with _hanging(tmp_path, "fork", "asleep", "gloo") as run:
        (script,) = psutil.Process(run.pid).children()
        (script if killed == "script" else run).kill()
    assert (
        len(re.findall(rf"the script \(process {script.pid}\) exited, so this rank ends too", _errors(tmp_path))) == 2
    )
