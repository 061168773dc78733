"""What each lesson says about itself: number, title, prerequisites, goals, time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import lesson_files
from ..errors import DdpLabError

_FILES = ("[0-9][0-9]_*.ipynb", "[A-Z]_*.ipynb")
_TITLE = re.compile(r"^# (?:Lesson (\d+)|Appendix ([A-Z])): (.+)$", re.MULTILINE)
_BULLET = re.compile(r"^\* \*\*([^*]+):\*\* (.+?)(?=\n\*|\n\n|\Z)", re.MULTILINE | re.DOTALL)
_CHECKS = re.compile(r"^\s*from checks\.(\w+) import", re.MULTILINE)
_LINK = re.compile(r"\]\((\d\d|[A-Z])_\w+\.ipynb\)")


@dataclass(frozen=True)
class Lesson:
    """A lesson or an appendix.

    Attributes:
        path: its notebook.
        number: ``"5"``, or ``"A"`` for an appendix.
        title: without the number.
        notebook: the parsed file.
    """

    path: Path
    number: str
    title: str
    notebook: dict[str, Any]

    @property
    def name(self) -> str:
        """``"lesson 5"`` or ``"appendix A"``."""
        return f"{'lesson' if self.number.isdigit() else 'appendix'} {self.number}"

    @cached_property
    def header(self) -> dict[str, str]:
        """The bullets of the first cell: ``Before``, ``You will be able to``, ``Time``, ``Hardware``."""
        return {name: " ".join(text.split()) for name, text in _BULLET.findall(source(self.notebook["cells"][0]))}

    @property
    def minutes(self) -> int | None:
        """How long it takes; None where the header does not state it."""
        found = re.search(r"(\d+) minutes", self.header.get("Time", ""))
        return int(found[1]) if found else None

    @property
    def before(self) -> list[str]:
        """The numbers of the lessons to read first."""
        return [one.lstrip("0") for one in _LINK.findall(self.header.get("Before", ""))]

    @property
    def exercises(self) -> list[int]:
        """The numbers of the exercises."""
        names = [tag for cell in self.notebook["cells"] for tag in tags(cell)]
        return sorted(int(name.removeprefix("exercise-")) for name in names if re.fullmatch(r"exercise-\d+", name))

    @property
    def checks(self) -> str:
        """The module with the checks of the exercises, ``"lesson_05"``."""
        return checks_of(self.notebook["cells"])


def lessons() -> list[Lesson]:
    """All lessons in order, appendices last.

    Raises:
        DdpLabError: they are not installed.
    """
    folder = lesson_files.home() / "tutorials"
    return [_lesson(path) for pattern in _FILES for path in sorted(folder.glob(pattern))]


def _lesson(path: Path) -> Lesson:
    """The lesson in a file."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    title = _TITLE.search(source(notebook["cells"][0]))
    if title is None:
        raise DdpLabError(f"{path} does not begin with the title of a lesson, such as `# Lesson 5: …`")
    return Lesson(path, title[1] or title[2], title[3], notebook)


def checks_of(cells: Iterable[Any]) -> str:
    """The module from which a notebook imports its checks; "" if it imports none."""
    found = (_CHECKS.search(source(cell)) for cell in cells if cell["cell_type"] == "code")
    return next((one[1] for one in found if one), "")


def source(cell: Any) -> str:
    """A cell's text: nbformat stores it as one text or as lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def tags(cell: Any) -> list[str]:
    """A cell's tags."""
    return list(cell["metadata"].get("tags", []))
