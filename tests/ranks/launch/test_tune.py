"""`ddp-lab tune`: scripts that know nothing of ddp_lab become faster while they train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
@pytest.mark.parametrize(("what", "code"), [("no model", 0), ("raises", 1)])
def test_programs_that_cannot_be_tuned(what: str, code: int) -> None:
    """Without a model, or after an error, the program's own end is kept and one line says that nothing was tuned."""
    done = _tune(SCRIPT, what, "8", code=code)
    assert "ddp-lab tune: not tuned: the program ended before" in done.stderr
