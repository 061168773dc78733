"""`ddp-lab tune`: scripts that know nothing of ddp_lab become faster while they train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import run
from tests.ranks.launch.test_run import ENVIRONMENT, PROGRAMS, SCRIPT, TWO

SLOW = str(PROGRAMS / "train_slow_hook.py")


def _tune(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `ddp-lab tune` on two ranks; it must end with this exit code."""
    command = [sys.executable, "-m", "ddp_lab", "tune", *TWO, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr[-6000:] + done.stdout[-2000:]
    return done


@pytest.mark.soak
def test_a_script_is_tuned_and_stopped(tmp_path: Path) -> None:
    """Of many buckets that cost 10 ms each it makes fewer, says how to write that, and ends the program if asked to."""
    answer = tmp_path / "answer.json"
    done = _tune("--steps", "3", "--seconds", "200", "--stop", "--json", str(answer), SLOW, "1000000")
    found = json.loads(answer.read_text())
    assert found["applied"], done.stdout + done.stderr
    assert found["gain"]["low_percent"] > 0
    assert found["arguments"] in done.stdout
    assert "bucket_cap_mb" in found["arguments"]
    assert "trained" not in done.stdout


@pytest.mark.soak
def test_a_program_that_ends_before(tmp_path: Path) -> None:
    """A program that ends before a winner is sure ends as ever, and the answer is that no setting was faster."""
    done = _tune("--steps", "3", SLOW, "40")
    assert "trained 40 steps, at the end with" in done.stdout
    assert "no setting was clearly faster than" in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize(("what", "code"), [("no model", 0), ("raises", 1)])
def test_programs_that_cannot_be_tuned(what: str, code: int) -> None:
    """Without a model, or after an error, the program's own end is kept and one line says that nothing was tuned."""
    done = _tune(SCRIPT, what, "8", code=code)
    assert "ddp-lab tune: not tuned: the program ended before" in done.stderr


@pytest.mark.soak
def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tune` tunes ranks that train, compares what was chosen with defaults and grid, and ends them."""
    path = tmp_path / "found.json"
    asked = "--model conv_net --caps 0.5 4 --rounds 1 --steps 3 --seconds 20"
    assert run("tune", [*asked.split(), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert {"first 1, then 25 MiB", "0.5 MiB", "4 MiB", "first 1, then 4 MiB"} <= set(found["steps_ms"])
    assert found["chosen"] in found["steps_ms"]
    assert found["again"]["low"] <= found["again"]["cost"] <= found["again"]["high"]
    assert found["again"]["pairs"] == (0 if found["best"] == found["chosen"] else 2 * found["rounds"])
    printed = capsys.readouterr().out
    assert "saving compared with torch's defaults" in printed
    assert "compared with the best of the grid: " in printed
