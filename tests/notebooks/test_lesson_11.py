"""Lesson 11, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks

WRONG = {
    "1": {
        "%%distributed\ntotal = torch.zeros(1)\nfor batch in range(3):\n    counted = torch.ones(1)\n"
        "    dist.all_reduce(counted)\n    total += counted": "was not counted",
        "%%distributed\ntotal = torch.tensor(3 + rank)": "Both should be 7",
    },
    "2": {
        "stuck_rank, stuck_in = 0, 'write_log'": "Which rank does it wait for",
        "stuck_rank, stuck_in = 1, 'load'": "which line calls wait_a_little",
    },
}


def test_the_doctor_explains_hangs(lesson: running.Notebook) -> None:
    """Each hang of lesson 11 gets its sentence, and calls that differ are found while no rank waits."""
    told = {
        name: running.text(running.cell(lesson, name))
        for name in ("busy-doctor", "exercise-1", "different-doctor", "apart-doctor", "exercise-2")
    }
    assert "rank 0 waits in all_reduce" in told["busy-doctor"]
    assert "rank 1 is in `time.sleep(600)`" in told["busy-doctor"]
    assert "rank 0 has finished the cell (its last collective: all_reduce #4 of 4 B" in told["exercise-1"]
    assert "in which rank 1 waits for it" in told["exercise-1"]
    assert re.search(r"rank 0 entered all_reduce #\d+ of 4 MiB .*, rank 1 broadcast #", told["different-doctor"])
    assert re.search(r"rank 0 entered all_reduce #\d+ of 4 MiB .*, rank 1 broadcast #", told["apart-doctor"])
    assert "is in `time.sleep(0.01)`" in told["apart-doctor"]
    assert "rank 1 is in `time.sleep(0.1)`" in told["exercise-2"]


def test_the_training_continues_after_a_failed_rank(lesson: running.Notebook) -> None:
    """Rank 0 keeps process and model, the new process gets the model by `copy_state_from`; both continue alike."""
    killed, after = (running.text(running.cell(lesson, name)) for name in ("gone-cell", "gone-after"))
    assert "rank 1 was killed by SIGKILL" in killed
    assert "rank 0 │ the same process, with all variables" in after
    assert "rank 1 │ a new process, with no model" in after
    assert after.count("continues at step 7") == 1  # equal lines of both ranks are shown once
    assert after.count("step 20, weights [") == 1
