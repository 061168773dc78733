"""The troubleshooting page quotes messages as they are: each heading's fixed parts are in one source file."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "tutorials" / "site" / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = [found[2].strip() for found in re.finditer(r"^### (`+)(.+?)\1$", PAGE, re.MULTILINE)]
_FIELD = "\0"


@cache
def texts() -> dict[str, str]:
    """What each source file can say: its texts, one after the other, with a sign in the place of each field."""
    made = {}
    for path in sorted((ROOT / "ddp_lab").rglob("*.py")):
        said: list[str] = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                said.append("".join(_part(one) for one in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
        made[str(path.relative_to(ROOT))] = "\n".join(said)
    for folder, suffixes in (("ddp_lab/dashboard/static", (".js",)), ("csrc", (".h", ".cpp"))):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in suffixes:
                source = path.read_text(encoding="utf-8")
                # C++ joins texts that follow each other, JavaScript those with a plus between them.
                source = re.sub(r'["`](?: \+)?\s*\n\s*["`]', "", source)
                made[str(path.relative_to(ROOT))] = re.sub(r"\$\{[^}]*\}", _FIELD, source)
    return made


def _part(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else _FIELD


def fixed_parts(heading: str) -> list[str]:
    """What a message says in every case."""
    return [part.strip() for part in heading.split("…") if re.search(r"\w", part)]


def test_there_are_many() -> None:
    """Each heading of the page with a message is read, and none is there twice."""
    assert len(HEADINGS) >= 20
    assert len(set(HEADINGS)) == len(HEADINGS)
    assert len(HEADINGS) == len(re.findall(r"^### `", PAGE, re.MULTILINE))


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_message_is_in_the_sources(heading: str) -> None:
    """All fixed parts of a heading are texts of one file, and below it there is a text."""
    parts = fixed_parts(heading)
    assert parts
    assert any(all(part in said for part in parts) for said in texts().values()), parts
    after = PAGE.split(heading, 1)[1].split("\n", 1)[1]
    assert len(after.split("\n### ")[0].split("\n## ")[0].strip()) > 40


def linked() -> dict[str, set[str]]:
    """Name of a heading -> the source files that link to it."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "ddp_lab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("with_help", "more"):
                if isinstance(node.args[-1], ast.Constant):
                    found.setdefault(node.args[-1].value, set()).add(str(path.relative_to(ROOT)))
                else:
                    assert path.stem == "documentation", f"{path}: the heading is not a text"
    return found


def test_messages_and_headings_name_each_other() -> None:
    """Each heading with a name is linked by the source that prints it, and each link has its heading."""
    named = dict(re.findall(r"^\(([\w-]+)\)=\n### `+(.+?)`+$", PAGE, re.MULTILINE))
    assert len(re.findall(r"^\([\w-]+\)=$", PAGE, re.MULTILINE)) == len(named)
    links = linked()
    assert set(links) == set(named)
    del named["rank-killed"]  # the words come from another source than the report that links
    for name, heading in named.items():
        saying = {path for path, said in texts().items() if all(part in said for part in fixed_parts(heading))}
        assert links[name] & saying, name
