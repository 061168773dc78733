"""The documents tell today's truth: the files, names and commands they mention exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "tutorials/reading_benchmarks.md"]
DOCUMENTS += ["tutorials/site/inside.md", "tutorials/site/descriptions.md"]


def sources() -> str:
    """All source text of the package and of csrc."""
    files = [*(ROOT / "ddp_lab").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
    return "\n".join(f.read_text(encoding="utf-8") for f in files if f.suffix in (".py", ".h", ".cpp"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_local_links_lead_somewhere(document: str) -> None:
    """Every relative link and picture of a document is a file of the repository."""
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (ROOT / document).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_mentioned_files_exist(document: str) -> None:
    """Every path in backticks that names a source file or folder exists."""
    text = (ROOT / document).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:ddp_lab|csrc|tests|notebooks|tutorials)/[\w./-]+)`", text)
    assert [p for p in paths if not (ROOT / p).exists()] == []


@pytest.mark.parametrize(
    ("document", "end"), [("ARCHITECTURE.md", "## Who owns"), ("tutorials/site/inside.md", "## Caps")]
)
def test_the_journeys_name_real_functions(document: str, end: str) -> None:
    """Every `Class.method`, `Class::method` and function named in a journey is defined in the sources."""
    text = (ROOT / document).read_text(encoding="utf-8").split("## Journeys")[1].split(end)[0]
    code = sources()
    missing = []
    for owner, member in re.findall(r"`([A-Z]\w+)(?:\.|::)(\w+)`", text):
        if not re.search(rf"\bclass {owner}\b", code) or not re.search(rf"\b{member}\(", code):
            missing.append(f"{owner}.{member}")
    missing += [name for name in re.findall(r"`([a-z_]+)`", text) if not re.search(rf"\b{name}\b", code)]
    assert missing == []


def test_make_targets_and_commands_exist() -> None:
    """Every `make` target and `ddp-lab` command that README and CONTRIBUTING mention is there."""
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) - targets == set()
    from ddp_lab.cli.main import BENCHMARKS
    from tests.benchmarks.__main__ import BENCHMARKS as DEVELOPERS

    for folder, names in {"ddp_lab/bench": BENCHMARKS, "tests/benchmarks": DEVELOPERS}.items():
        for name in names:
            module = ROOT / folder / name.replace("-", "_")
            assert module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()
            assert f"`{name}`" in text
