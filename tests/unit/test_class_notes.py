"""The pages for teachers have notes on every lesson, plans that fit, and handouts whose names exist."""

from __future__ import annotations

import argparse
import html
import importlib
import re

import ddp_lab
from ddp_lab import teaching
from ddp_lab.notebook import magics
from tests.unit.conftest import SITE, SiteModule

TEACH = SITE / "teach"
LEADS = ("Timing", "Show", "Discuss")
SESSION = 90  # minutes


def notes() -> str:
    """The page of notes as it is stored."""
    return (TEACH / "notes.md").read_text(encoding="utf-8")


def test_every_lesson_has_notes(site_module: SiteModule) -> None:
    """Each lesson has a section, in the lessons' order, with time, what to show, and at least three questions."""
    class_notes = site_module("class_notes")
    _, *parts = re.split(r"^<!-- lesson: (\w+) -->$", notes(), flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(sections) == list(class_notes.by_name())
    for name, text in sections.items():
        assert tuple(re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)) == LEADS, name
        assert len(re.findall(r"^\d\. .+", text, re.MULTILINE)) >= 3, name


def test_notes_hold_facts_and_wrong_answers(site_module: SiteModule) -> None:
    """What the first cell states, each exercise, and each wrong answer of the tests with what the check says. A hint is
    the whole sentence of the check; if it can't be found, it is marked as a part."""
    class_notes = site_module("class_notes")
    page = class_notes.filled(notes())
    assert "<!-- lesson" not in page
    section = page.split("## Lesson 5: data parallel in fifty lines\n")[1].split("\n## ")[0]
    assert "| **Before** | [lesson 1](../../01_ranks_and_cells.ipynb), which explains" in section
    assert "| **Exercises** | 1. average the gradients, 2. weight the loss |" in section
    assert "```python\nweight = samples / total\n```" in section
    assert "they add up to 1. The average divides by world\\_size once more." in section
    for lesson in teaching.lessons():
        found = class_notes.wrong_answers(lesson)
        tested = importlib.import_module(f"tests.notebooks.test_{lesson.checks}").WRONG
        assert {number: [*tried] for number, tried in found.items()} == {int(one): [*tested[one]] for one in tested}
        assert list(found) == lesson.exercises, lesson.name
        assert list(class_notes.exercises_of(lesson)) == lesson.exercises, lesson.name
        assert all(answer and why for tried in found.values() for answer, why in tried.items()), lesson.name
    [lesson] = [one for one in teaching.lessons() if one.number == "5"]
    assert class_notes.hint(lesson, "Divide by world_size") == "these are sums over the ranks. Divide by world_size."
    assert class_notes.hint(lesson, "nobody says this") == "… nobody says this …"


def test_plans_fit(site_module: SiteModule) -> None:
    """The lessons and talks of a session take at most 90 minutes; every lesson is in a plan or named below it."""
    class_notes = site_module("class_notes")
    page = (TEACH / "index.md").read_text(encoding="utf-8")
    lessons = class_notes.by_name()
    assert set(re.findall(r"\{lesson (\w+)\}", page)) == set(lessons)
    for plan, sessions in {"Two sessions of 90 minutes": 2, "Four weeks": 4}.items():
        table = page.split(f"## {plan}\n")[1].split("\n## ")[0]
        taken: dict[str, int] = {}
        for session, minutes, what in re.findall(r"^\| ([\w ]+) \| ?(\d*) \| (.+) \|$", table, re.MULTILINE):
            named = re.findall(r"\{lesson (\w+)\}", what)
            assert named or minutes or session == "at home", what
            if session.isdigit():
                taken[session] = (
                    taken.get(session, 0) + sum(lessons[one].minutes or 0 for one in named) + int(minutes or 0)
                )
        assert len(taken) == sessions
        assert max(taken.values()) <= SESSION, (plan, taken)
    link = "[Lesson 5: data parallel in fifty lines](../../05_data_parallel_in_fifty_lines.ipynb) (30 min)"
    assert class_notes.filled("{lesson data_parallel_in_fifty_lines}") == link


def test_handouts_name_what_exists(site_module: SiteModule) -> None:
    """Each magic, command, option and name of the product on a handout exists."""
    handouts = site_module("handouts")
    known = {"load_ext"}
    commands: set[str] = set()
    for name, (_, parser, *_) in magics._MAGICS.items():
        known |= {name}
        for one in parser._actions:
            if isinstance(one, argparse._SubParsersAction):
                commands |= set(one.choices)
                known |= {option for each in one.choices.values() for option in each._option_string_actions}
        known |= set(parser._option_string_actions)
    for name in handouts.NAMES:
        page = handouts.page(name)
        assert "{{" not in page
        text = html.unescape(re.sub(r"<style.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page, flags=re.DOTALL))
        assert [one for one in re.findall(r"%%?(\w+)", text) if one not in known] == []
        assert [one for one in re.findall(r"(?<![\w-])--[a-z][\w-]*", text) if one not in known] == []
        assert [one for one in re.findall(r"%cluster ([a-z]+)", text) if one not in commands] == []
        for owner, method in (
            ("lab", ddp_lab.Cluster),
            ("lab.timeline", ddp_lab.Timeline),
            ("Timeline", ddp_lab.Timeline),
        ):
            named = re.findall(rf"(?<![\w.]){re.escape(owner)}\.(\w+)\(", text.replace("ddp_lab.", ""))
            assert [one for one in named if not hasattr(method, one)] == []


def test_handouts_leave_nothing_out(site_module: SiteModule) -> None:
    """The magics' handout has each option of a cell and of a start, and each command.

    That of the timeline has each kind of bar.
    """
    page, parser_of = site_module("handouts").page, site_module("option_tables").parser_of
    shown = set(re.findall(r"(?:<code>|, (?=--))([\w-]+)", page("magics")))
    for magic in ("%%distributed", "%cluster start"):
        names = [set(one.option_strings) for one in parser_of(magic)._actions if one.option_strings]
        assert [one for one in names if not one & {"--help", *shown}] == []
    [commands] = [one for one in parser_of("%cluster")._actions if isinstance(one, argparse._SubParsersAction)]
    assert set(commands.choices) <= shown
    assert "<code>--backend auto|nccl|gloo|shm|mpi</code>" in page("magics")
    assert re.findall(r"<td>(\d)</td>", page("timeline")) == [str(number) for number in range(1, 8)]
