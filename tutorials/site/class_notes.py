"""The instructor's notes: what the lessons, their checks and the tests' wrong answers know is put into the pages.

`{lesson NAME}` on a page is a link with the lesson's title and minutes. `<!-- lesson: NAME -->` begins the notes on a
lesson: it becomes a heading with the facts of the lesson's first cell, and the wrong answers that its tests try follow
the notes. NAME is the notebook's name without its number, which may change.
"""

import ast
import functools
import re
from pathlib import Path

from ddp_lab import teaching

_ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\{lesson (\w+)\}")
_SECTION = re.compile(r"^<!-- lesson: (\w+) -->$", re.MULTILINE)
_EXERCISE = re.compile(r"^### Exercise (\d+): (.+)$", re.MULTILINE)
_FACTS = ("Before", "You will be able to", "Time", "Hardware")
_FIELD = "…"  # in a hint: a value that the check finds


def filled(page):
    """A page's text with what the lessons say.

    Raises:
        KeyError: there is no lesson of a name.
    """
    if not _SECTION.search(page) and not _LINK.search(page):
        return page
    first, *rest = _SECTION.split(page)
    sections = [_section(name, notes) for name, notes in zip(rest[::2], rest[1::2], strict=True)]
    return _LINK.sub(lambda found: _link(found[1]), "".join([first, *sections]))


def by_name():
    """The lessons in order, by the name that pages use."""
    return {one.path.stem.partition("_")[2]: one for one in teaching.lessons()}


def _link(name):
    lesson = by_name()[name]
    time = f" ({lesson.minutes} min)" if lesson.minutes else ""
    return f"[{_title(lesson)}](../../{lesson.path.name}){time}"


def _title(lesson):
    return f"{lesson.name[0].upper()}{lesson.name[1:]}: {lesson.title}"


def _section(name, notes):
    lesson = by_name()[name]
    return f"## {_title(lesson)}\n\n{_facts(lesson)}\n\n{notes.strip()}\n\n{_mistakes(lesson)}\n\n"


def _facts(lesson):
    """The first cell's bullets, and the exercises, as a table."""
    rows = [f"| **{name}** | {lesson.header[name]} |" for name in _FACTS if name in lesson.header]
    exercises = ", ".join(f"{number}. {title}" for number, title in exercises_of(lesson).items())
    table = "\n".join(["| | |", "|---|---|", *rows, f"| **Exercises** | {exercises} |"])
    return re.sub(r"\]\((?!https?://)", "](../../", table)


def exercises_of(lesson):
    """An exercise's number -> its title."""
    text = "\n".join(teaching.source(cell) for cell in lesson.notebook["cells"] if cell["cell_type"] == "markdown")
    return {int(number): title for number, title in _EXERCISE.findall(text)}


# -- wrong answers


def wrong_answers(lesson):
    """Exercise -> answer -> what its check says, from the tests of the lesson."""
    return {
        int(number): {answer: hint(lesson, part) for answer, part in tried.items()}
        for number, tried in _table(lesson.checks).items()
    }


def _table(checks):
    """`WRONG` of a lesson's tests, with the names that it needs: the tests' packages may be missing here."""
    path = _ROOT / "tests" / "notebooks" / f"test_{checks}.py"
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    needed, before = {"WRONG"}, set()
    while needed != before:
        before = set(needed)
        for statement in statements:
            if needed & set(_defined(statement)):
                needed |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    kept = [statement for statement in statements if needed & set(_defined(statement))]
    made = {}
    exec(compile(ast.Module(kept, []), path, "exec"), made)
    return made["WRONG"]


def _defined(statement):
    """The names that a statement at the top of a module defines."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def hint(lesson, part):
    """The one hint of the checks that contains a part; if none or several do, the part."""
    whole = [text for text in _hints(lesson.checks) if part in text]
    return whole[0] if len(whole) == 1 else f"{_FIELD} {part} {_FIELD}"


@functools.cache
def _hints(checks):
    """What the checks of a lesson may say, without "Not yet: "."""
    tree = ast.parse((_ROOT / "tutorials" / "checks" / f"{checks}.py").read_text(encoding="utf-8"))
    texts = (_text(node) for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr))
    return [text.partition("Not yet: ")[2] for text in texts if text.startswith("Not yet: ")]


def _text(node):
    """A text of the source; a value that is put into it is "…"."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_text(part) if isinstance(part, ast.Constant) else _FIELD for part in node.values)


def _mistakes(lesson):
    """Folded: each wrong answer with the hint that a student gets."""
    lines = ["**Wrong answers that the checks know**"]
    for number, tried in wrong_answers(lesson).items():
        lines += [f"<details><summary>Exercise {number}: {len(tried)} wrong answers</summary>", ""]
        for answer, why in tried.items():
            code = re.sub(r"^%%distributed\n", "", answer).strip("\n")
            lines += [f"```python\n{code}\n```", "", f"The check says: *{_escaped(why)}*", ""]
        lines += ["</details>", ""]
    return "\n".join([lines[0], "", *lines[1:]])


def _escaped(text):
    """A hint as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", " ".join(text.split()))
