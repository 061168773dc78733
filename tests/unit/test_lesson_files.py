"""Where notebooks and lessons are found, in a clone and where a wheel has put them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ddp_lab import DdpLabError, lesson_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As after the installation of a wheel: nothing beside the package, the lessons in the environment."""
    data = tmp_path / "environment"
    for folder in lesson_files.FOLDERS:
        shutil.copytree(ROOT / folder, data / "share" / "ddp_lab" / folder)
    monkeypatch.setattr(lesson_files, "_PACKAGE", data / "lib" / "ddp_lab")
    monkeypatch.setattr(lesson_files.sysconfig, "get_path", lambda name: {"data": str(data)}[name])
    return data


def test_a_clone(tmp_path: Path) -> None:
    """In a clone its own notebooks are opened, and nothing is copied. JupyterLab of a clone looks for the extension
    there, and the extension is whole."""
    assert lesson_files.working_copy(tmp_path) == lesson_files.home() == ROOT
    assert list(tmp_path.iterdir()) == []
    extension = Path(lesson_files.lab_environment()["JUPYTER_PATH"].split(os.pathsep)[0]) / "labextensions" / "ddp_lab"
    assert (extension / "package.json").is_file()
    assert (extension / "static" / "launcher.js").is_file()


def test_what_a_reader_wrote_stays(installed: Path, tmp_path: Path) -> None:
    """A wheel's lessons are copied once; a changed one is left alone, a missing one comes again."""
    copied = lesson_files.working_copy(tmp_path)
    assert copied == tmp_path / "ddp_lab_lessons"
    lessons = {path.name for path in (ROOT / "tutorials").glob("*.ipynb")}
    assert {path.name for path in (copied / "tutorials").glob("*.ipynb")} == lessons
    first, second = sorted(lessons)[:2]
    (copied / "tutorials" / first).write_text("mine")
    (copied / "tutorials" / second).unlink()
    lesson_files.working_copy(tmp_path)
    assert (copied / "tutorials" / first).read_text() == "mine"
    assert (copied / "tutorials" / second).exists()


def test_without_lessons_the_remedy_is_named(installed: Path, tmp_path: Path) -> None:
    """Where neither is there, the error names both places and what to install."""
    shutil.rmtree(installed / "share")
    with pytest.raises(DdpLabError, match=r"neither next to this package .* nor in .*make wheel"):
        lesson_files.working_copy(tmp_path)
    assert list(tmp_path.iterdir()) == [installed]
