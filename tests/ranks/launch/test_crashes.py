"""`ddp-lab run` says why ranks ended before they waited for each other."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from ddp_lab import Timeline
from ddp_lab.launch import recorded_rank
from tests.waiting import wait_until

SCRIPT = Path(__file__).with_name("crashing_script.py")
SPAWNING = SCRIPT.with_name("spawning_script.py")


def _at(text: str, number: int = 0) -> str:
    """File and line of the script where this text comes, the first time or later."""
    lines = [line for line, words in enumerate(SCRIPT.read_text().splitlines(), 1) if text in words]
    return f"{SCRIPT}:{lines[number]}"


def _function(name: str, text: str) -> str:
    """The same, of the first such line in a function."""
    lines = SCRIPT.read_text().splitlines()
    first = lines.index(f"def {name}() -> None:")
    return f"{SCRIPT}:{next(at for at in range(first, len(lines)) if text in lines[at]) + 1}"


BACKWARD = "model(ones).sum().backward()"
CRASHES = [
    (
        "swallowed",
        [
            f"rank 1 had finished the program (it had logged WARNING: "
            f"skipped the rest: 'no goal' ({_at('logging.warn')}))",
            f"without entering barrier #2 at {_at('dist.barrier()')}, in which rank 0 waited for it.",
            "rank 0 ended early: RuntimeError: ",
        ],
    ),
    (
        "prints_its_error",
        [
            f"rank 1 had finished the program (it had caught KeyError: 'no goal' "
            f"({_function('prints_its_error', 'raise KeyError')}))",
            f"without entering barrier #2 at {_function('prints_its_error', 'dist.barrier()')}, in which rank 0",
        ],
    ),
    (
        "skips_a_batch",
        [
            f"of 80 B (float32) for bucket 0 of Linear at {_function('skips_a_batch', 'loss.backward()')}",
            f"of 4 B (float32) at {_function('skips_a_batch', 'all_reduce(total)')}",
            "Rank 1 made 7 backwards of Linear; rank 0 is in its 8th.",
            "Rank 1 made a forward at step 3 without a backward.",
            "→ All ranks must make the same number of backwards",
        ],
    ),
    (
        "exits_at_once",
        [
            "rank 1 had exited with code 0 before the end of the program (its last collective: all_reduce #1 of 32 B",
            f"without entering barrier #2 at {_function('exits_at_once', 'dist.barrier()')}, in which rank 0 waited",
            "→ All ranks of a group must make the same calls in the same order.",
        ],
    ),
    (
        "validates_on_one_rank",
        [
            f"for the buffers at {_function('validates_on_one_rank', 'model(ones)')}",
            f"of 256 B (float32) at {_function('validates_on_one_rank', 'broadcast')}",
            "→ The forward of a DistributedDataParallel model broadcasts its buffers",
            "To validate on one rank, call `model.module`.",
        ],
    ),
    (
        "sharded_with_fewer_batches",
        [
            "rank 1 had finished the program (its last collective: reduce_scatter #14 of 80 B (float32) for "
            "Sequential (reduc",
            "without entering all_gather #15 of 40 B (float32) for Sequential (forward)",
            f"at {_function('sharded_with_fewer_batches', BACKWARD)}, in which rank 0 waited for it.",
            "→ All ranks must run the same number of batches",
        ],
    ),
    (
        "buffers",
        [
            "for the buffers",
            "The buffer mask has the shape [5, 4] on rank 0 and [2, 4] on rank 1.",
            "broadcast_buffers=False",
        ],
    ),
]


@pytest.mark.parametrize(
    ("case", "words"),
    [CRASHES[0], *(pytest.param(*one, marks=pytest.mark.soak, id=one[0]) for one in CRASHES[1:])],
)
def test_a_crash_is_explained(tmp_path: Path, case: str, words: list[str]) -> None:
    """First of all, with the ranks and their lines; the page begins with it, and of speed nothing is said."""
    run = [sys.executable, "-m", "ddp_lab", "run", "--record", str(tmp_path / "run"), "--standalone"]
    command = [*run, "--nproc-per-node", "2", "--on-hang", "stop", str(SCRIPT), case]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    told = done.stderr.partition("torch's agent ended the run")[2]
    assert [one for one in words if one not in told] == [], told
    assert "GLHF" not in told
    assert "Main finding" not in done.stdout
    page = html.unescape((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    first = page[page.index("<h2") :]
    assert "The run failed" in first.partition("</h2>")[0]
    assert words[0][1:] in first.partition("</section>")[0]
    assert '<dl class="tiles">' not in page[: page.index("<h2")]


@pytest.mark.soak
def test_a_killed_rank_is_started_again(tmp_path: Path) -> None:
    """By torch's agent, once: the next attempt finds no addresses of dead ranks, and trains. The first one's events are
    all kept, and why it ended is not said of the run, which ended well."""
    run = [sys.executable, "-m", "ddp_lab", "run", "--record", str(tmp_path / "run"), "--standalone"]
    command = [*run, "--nproc-per-node", "2", "--max-restarts", "1", str(SCRIPT), "killed_once"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = Timeline.load(tmp_path / "run" / "timeline.npz").steps()
    assert steps.groupby(["reducer", "rank"]).size().to_dict() == {(0, 0): 3, (0, 1): 2, (1, 0): 4, (1, 1): 4}
    assert "The run failed" not in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def _spawns(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "ddp_lab", "run", "--record", str(folder / "run")]
    return subprocess.run([*run, *options], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("spawn", marks=pytest.mark.soak),
        "twice fork by variables",
        pytest.param("forkserver by variables", marks=pytest.mark.soak),
    ],
)
def test_a_script_that_starts_its_ranks_itself(tmp_path: Path, how: str) -> None:
    """It runs as it is, whether torch.multiprocessing.spawn or a process for each starts its ranks, which are recorded.
    The process that the agent has started is none, nor is one that only waits. A script may start its ranks again."""
    done = _spawns(tmp_path, str(SPAWNING), how)
    assert done.returncode == 0, done.stderr
    assert "Linear on 2 ranks" in done.stdout
    steps = Timeline.load(tmp_path / "run").steps()
    models = range(2 if how.startswith("twice") else 1)
    expected = {(model, rank): 6 for model in models for rank in range(2)}
    assert steps.groupby(["reducer", "rank"]).size().to_dict() == expected


@pytest.mark.soak
def test_a_script_that_starts_its_ranks_as_commands(tmp_path: Path) -> None:
    """They run as without ddp-lab; that they are not recorded is told at once, with what records them."""
    done = _spawns(tmp_path, str(SPAWNING), "commands")
    assert done.returncode == 0, done.stderr
    line = next(at for at, words in enumerate(SPAWNING.read_text().splitlines(), 1) if "subprocess.Popen(" in words)
    assert f"starts ranks as commands of its own ({SPAWNING}:{line}): these are not recorded" in done.stderr
    assert done.stderr.count("`ddp-lab run --standalone --nproc-per-node 2`") == 1


@pytest.mark.soak
def test_a_script_that_starts_its_ranks_itself_is_started_twice(tmp_path: Path) -> None:
    """Then they would be too many: it is told at once."""
    done = _spawns(tmp_path, "--standalone", "--nproc-per-node", "2", str(SPAWNING), "spawn")
    assert done.returncode == 1
    line = next(at for at, words in enumerate(SPAWNING.read_text().splitlines(), 1) if "mp.spawn(" in words)
    assert f"the script starts its ranks itself ({SPAWNING}:{line})" in done.stderr
    assert "run it without --nproc-per-node" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("case", "told"), [("encodes_without_forward", True), ("mixes_in_forward", False)])
def test_a_method_that_gathers_nothing_is_named(tmp_path: Path, case: str, told: bool) -> None:
    """Under torch's error, which speaks of tensors alone; not where the same error has another cause."""
    run = [sys.executable, "-m", "ddp_lab", "run", "--record", str(tmp_path / "run"), "--standalone"]
    command = [*run, "--nproc-per-node", "2", str(SCRIPT), case]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "got mixed torch.Tensor and DTensor" in done.stderr
    assert ("`encode` of Encoder was called, but only `forward` gathers" in done.stderr) == told, done.stderr
    assert ("register_fsdp_forward_method(model, 'encode')" in done.stderr) == told


def test_a_worker_of_a_data_loader_is_named() -> None:
    """What a rank raises when one is killed may be an error of the connection to it alone."""
    error, worker = ConnectionResetError("reset by peer"), subprocess.Popen(["sleep", "600"])
    assert recorded_rank.of_worker(error) == ""
    torch._C._set_worker_pids(0, (worker.pid,))
    try:
        worker.kill()
        wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE, "it has ended")
        told = f"; DataLoader worker (pid {worker.pid}) is killed by signal: Killed"
        assert (recorded_rank.of_worker(error), recorded_rank.of_worker(ValueError())) == (told, "")
    finally:
        torch._C._remove_worker_pids(0)
        worker.wait()
