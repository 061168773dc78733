"""The lessons, run on real ranks: their claims hold, and their checks know right answers from wrong ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import running

LESSONS = running.PROJECT / "tutorials"
_AVERAGE = "%%distributed\ndef average(gradients):\n"
_CAT = "    buffer = torch.cat([g.flatten() for g in gradients])\n    dist.all_reduce(buffer)\n"
_COUNT = (
    "%%distributed\ntotal = torch.zeros(1)\nfor batch in {}:\n    counted = torch.ones(1){}\n    total += counted\n"
)

# exercise -> wrong answers, and what the check says to each
WRONG = {
    "01_ranks_and_cells": {
        "1": {"%%distributed\npart = sum(numbers[:100])": "together"},
        "2": {
            "%%distributed\nmean = mine.mean()\ndist.all_reduce(mean)\nmean = mean.item() / 2": "mean of the two means",
            "%%distributed\nmean = 1.0": "should be",
        },
    },
    "02_buckets_and_overlap": {
        "1": {
            _AVERAGE + "    for g in gradients:\n        dist.all_reduce(g)\n        g /= world_size": "2 times",
            _AVERAGE + _CAT: "not the averages",
            _AVERAGE
            + _CAT
            + "    for g, s in zip(gradients, buffer.split([6, 4])):\n        g.copy_(s.view_as(g))": "sums",
        },
        "2": {"late_rank, late_bucket = 1, 1": "because it waits", "late_rank, late_bucket = 0, 0": "still on time"},
    },
    "11_why_does_my_cell_hang": {
        "1": {
            _COUNT.format("range(3)", "\n    dist.all_reduce(counted)"): "was left out",
            _COUNT.format("range(3 + rank)", ""): "Both ranks should come to 7",
        },
    },
}


def _with_answers(path: Path) -> running.Notebook:
    """The lesson with wrong answers, then the solution, each followed by the check, after the untouched exercise."""
    notebook = running.read(path)
    for number, wrong in WRONG[path.stem].items():
        exercise, check, solution = (
            running.tagged(notebook, f"{part}-{number}") for part in ("exercise", "check", "solution")
        )
        tried = []
        for index, answer in enumerate([*wrong, solution.source]):
            name = f"{number}-{index}"
            tried += [
                running.copy_of(exercise, answer, f"answer-{name}"),
                running.copy_of(check, name=f"verdict-{name}"),
            ]
        after = notebook.cells.index(check) + 1
        notebook.cells[after:after] = tried
    return notebook


def _executed(name: str) -> running.Notebook:
    """The lesson after "Run all"."""
    return running.execute(_with_answers(LESSONS / f"{name}.ipynb"), LESSONS)


@pytest.fixture(scope="module")
def ranks_and_cells() -> running.Notebook:
    return _executed("01_ranks_and_cells")


@pytest.fixture(scope="module")
def buckets_and_overlap() -> running.Notebook:
    return _executed("02_buckets_and_overlap")


@pytest.fixture(scope="module")
def why_does_my_cell_hang() -> running.Notebook:
    return _executed("11_why_does_my_cell_hang")


def _judges(notebook: running.Notebook, number: str, wrong: dict[str, str]) -> None:
    """Asserts what the check says to the untouched exercise, to each wrong answer and to the solution."""
    assert "Not yet: " in running.text(running.cell(notebook, f"check-{number}"))
    for index, expected in enumerate(wrong.values()):
        verdict = running.text(running.cell(notebook, f"verdict-{number}-{index}"))
        assert "Not yet: " in verdict
        assert expected in verdict
    assert "Right: " in running.text(running.cell(notebook, f"verdict-{number}-{len(wrong)}"))


def test_all_lessons_are_here() -> None:
    """Every lesson has answers to try here."""
    assert sorted(WRONG) == [path.stem for path in running.LESSONS]


@pytest.mark.parametrize("number", ["1", "2"])
def test_checks_of_lesson_1(ranks_and_cells: running.Notebook, number: str) -> None:
    """A check says "Not yet" to the untouched exercise, names what is wrong with an answer, accepts the solution."""
    _judges(ranks_and_cells, number, WRONG["01_ranks_and_cells"][number])


@pytest.mark.parametrize("number", ["1", "2"])
def test_checks_of_lesson_2(buckets_and_overlap: running.Notebook, number: str) -> None:
    """A check says "Not yet" to the untouched exercise, names what is wrong with an answer, accepts the solution."""
    _judges(buckets_and_overlap, number, WRONG["02_buckets_and_overlap"][number])


def test_the_check_of_lesson_11(why_does_my_cell_hang: running.Notebook) -> None:
    """A check says "Not yet" to the untouched exercise, names what is wrong with an answer, accepts the solution."""
    _judges(why_does_my_cell_hang, "1", WRONG["11_why_does_my_cell_hang"]["1"])


def test_the_doctor_explains_hangs(why_does_my_cell_hang: running.Notebook) -> None:
    """Each hang of lesson 11 gets its sentence, and calls that differ are told of while nobody waits."""
    told = {
        name: running.text(running.cell(why_does_my_cell_hang, name))
        for name in ("busy-doctor", "ended-doctor", "different-doctor", "apart-cell", "gone-cell", "gone-after")
    }
    assert "rank 0 waits in all_reduce" in told["busy-doctor"]
    assert "rank 1 is in `time.sleep(600)`" in told["busy-doctor"]
    assert "rank 1 has ended the cell; rank 0 still waits in all_reduce" in told["ended-doctor"]
    assert re.search(r"rank 0 entered all_reduce #\d+ of 4 MiB .*, rank 1 broadcast #", told["different-doctor"])
    assert "the ranks make different calls: rank 0 entered all_reduce" in told["apart-cell"]
    assert "rank 1 was killed by SIGKILL" in told["gone-cell"]
    assert told["gone-after"].split("\n") == ["rank 0 → True", "rank 1 → False"]


def test_errors_cost_nothing(ranks_and_cells: running.Notebook) -> None:
    """After one rank's error, and after a time-out, the ranks still have their variables and work together."""
    failed = running.text(running.cell(ranks_and_cells, "one-rank-fails"))
    assert "rank 1 trips over its shoelaces" in failed
    assert "rank 0 waited for rank 1 in all_reduce #" in failed
    works = running.text(running.cell(ranks_and_cells, "works-again"))
    assert "rank 0 still has part = 250000" in works
    assert "ranks 0–1 → 500500" in works
    assert "did not end within 2 s" in running.text(running.cell(ranks_and_cells, "timeout"))
    assert re.search(r"\{0: \d+, 1: \d+\}", running.text(running.cell(ranks_and_cells, "after-timeout")))


def test_by_hand_and_by_ddp(buckets_and_overlap: running.Notebook) -> None:
    """The hand-written versions average alike, each is drawn, and DDP's single bucket hides next to nothing."""
    told = running.text(running.cell(buckets_and_overlap, "overlap"))
    assert told.count("the same gradients: True") == len(re.findall(r"naive [\d.]+ ms", told)) > 0
    [drawn] = running.cell(buckets_and_overlap, "draw-three").outputs
    assert len(drawn.data["application/vnd.plotly.v1+json"]["data"]) == 6
    table = running.text(running.cell(buckets_and_overlap, "one-or-several-seen"))
    one, several = (float(value) for value in re.findall(r"hidden_ms +([\d.]+) +([\d.]+)", table)[0])
    assert one < several


def test_readiness_names_rank_and_layer(buckets_and_overlap: running.Notebook) -> None:
    """The delay that was put behind layer 8 of rank 0 is found there, from the events alone."""
    found = running.text(running.cell(buckets_and_overlap, "solution-2"))
    assert re.search(r"LatePlace\(rank=0, bucket=1, parameter='layer8\.\w+'", found)
