"""`make affected` runs what a change can have broken."""

from __future__ import annotations

import pytest

from tests import affected


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("ddp_lab/bucketing.py", "tests/unit/test_bucketing.py"),  # imported
        ("ddp_lab/engine/rank.py", "tests/cluster/test_cells.py"),  # named to another process
        ("ddp_lab/notebook/magics.py", "tests/cluster/test_magics.py"),  # loaded by a cell
        ("ddp_lab/launch/agent.py", "tests/ranks/launch/test_run.py"),  # behind a command
        ("csrc/reduce/reducer.cpp", "tests/ranks/reducer/test_gradients.py"),  # compiled
        ("ddp_lab/dashboard/static/app/status_lines.js", "tests/browser/test_views.py"),  # loaded by a page
        ("notebooks/paper/hardware.py", "tests/unit/bench/test_paper_hardware.py"),
        ("tutorials/checks/lesson_14.py", "tests/notebooks/test_lesson_14.py"),
        ("README.md", "tests/unit/test_documents.py"),  # read
        ("tests/ranks/launch/hanging_script.py", "tests/ranks/launch/test_hang_watch.py"),  # run
        ("tests/cluster/conftest.py", "tests/cluster/test_cells.py"),  # loaded by pytest
    ],
)
def test_what_a_file_reaches(changed: str, reached: str) -> None:
    """By every way in which tests use a file; most tests are not reached."""
    found = affected.affected([changed])
    assert reached in found
    assert len(found) < len(affected.affected(["tests/conftest.py"]))


def test_a_changed_test_is_reached(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A test file reaches itself, and nothing else. It lists what is reached by what differs from a revision, and
    refuses what is not a revision."""
    assert affected.affected(["tests/processes/test_affected.py"]) == ["tests/processes/test_affected.py"]
    assert affected.main("no-such-revision", "--list") == 2
    assert "no-such-revision is not a revision" in capsys.readouterr().err
    monkeypatch.setattr(affected, "changed", lambda revision: {"ddp_lab/bucketing.py", f"{revision}.txt"})
    assert affected.main("HEAD", "--list") == 0
    assert "tests/unit/test_bucketing.py\n" in capsys.readouterr().out
    monkeypatch.setattr(affected, "changed", lambda revision: {"LICENSE-of-nobody"})
    assert affected.main("HEAD", "--list") == 0
    assert capsys.readouterr().out == "no test is reached by what has changed since HEAD\n"
