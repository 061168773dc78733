"""The documents tell today's truth: the files, names and commands they mention exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ddp_lab.diagnosis.collectives_in_flight import Collective, Flight, GroupFlights
from ddp_lab.diagnosis.report import HangReport
from ddp_lab.diagnosis.snapshot import BucketStage, Model, Place, RankSnapshot

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("tutorials/*.md")])
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tutorials/site/**/*.md"))


def sources() -> str:
    """All source text of the package and of csrc."""
    files = [*(ROOT / "ddp_lab").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
    return "\n".join(f.read_text(encoding="utf-8") for f in files if f.suffix in (".py", ".h", ".cpp"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_local_links_lead_somewhere(document: str) -> None:
    """Every relative link and picture of a document is a file of the repository, and has the heading that it names;
    every path in backticks that names a source file or folder exists."""
    page = ROOT / document
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:ddp_lab|csrc|tests|notebooks|tutorials)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}, link


def test_the_journeys_name_real_functions() -> None:
    """Every `Class.method`, `Class::method` and function named in a journey is defined in the sources."""
    code = sources()
    classes, called, words = (set(re.findall(one, code)) for one in (r"\bclass (\w+)", r"\b(\w+)\(", r"\w+"))
    for document, end in (("ARCHITECTURE.md", "## Who owns"), ("tutorials/site/inside.md", "## Caps")):
        text = (ROOT / document).read_text(encoding="utf-8").split("## Journeys")[1].split(end)[0]
        methods = re.findall(r"`([A-Z]\w+)(?:\.|::)(\w+)`", text)
        assert {owner for owner, _ in methods} <= classes, document
        assert {member for _, member in methods} <= called, document
        assert {*re.findall(r"`([a-z_]+)`", text)} <= words, document


def test_make_targets_and_commands_exist() -> None:
    """Every `make` target that a document mentions is there; each benchmark exists and is in its document. README has
    at most 120 lines."""
    text = "".join((ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) - targets == set()
    from ddp_lab.cli.main import BENCHMARKS
    from tests.benchmarks.__main__ import BENCHMARKS as DEVELOPERS

    for folder, names, document in (
        ("ddp_lab/bench", BENCHMARKS, "tutorials/site/api/commands.md"),
        ("tests/benchmarks", DEVELOPERS, "CONTRIBUTING.md"),
    ):
        listed = (ROOT / document).read_text(encoding="utf-8")
        for name in names:
            module = ROOT / folder / name.replace("-", "_")
            assert module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()
            assert f"`{name}`" in listed
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_hooks_run_the_versions_of_make_check() -> None:
    """The hooks of pre-commit are pinned to the releases of the tools that `make check` installs."""
    pins = dict(re.findall(r'"([a-z-]+)==([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = {hook["id"]: one["rev"].removeprefix("v") for one in repositories if "rev" in one for hook in one["hooks"]}
    assert hooks.pop("nbstripout")
    assert hooks == {"ruff-format": pins["ruff"], "ruff-check": pins["ruff"], "clang-format": pins["clang-format"]}


def test_workflows_and_templates_can_be_read() -> None:
    """Workflows run targets that are there; each form for an issue has what the site that shows it requires."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        assert {*re.findall(r"\bmake ([a-z-]+)", "\n".join(commands))} <= targets
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert {path.stem for path in forms} == {"bug", "feature", "wrong_diagnosis"}
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids)
        assert all(field["attributes"]["label"] for field in form["body"])


def test_the_first_script_is_in_the_clone() -> None:
    """README's command runs a script of the repository, and the page about it shows the same text."""
    [script] = re.findall(r"ddp-lab run .* (\S+\.py)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    page = (ROOT / "tutorials/site/get_started/script.md").read_text(encoding="utf-8")
    assert f"```python\n{(ROOT / script).read_text(encoding='utf-8')}```\n" in page


def test_the_readme_shows_what_the_doctor_prints() -> None:
    """The report that README quotes begins as the product prints it for ranks in that state."""
    line = Place("<cell %%distributed [4]>", 8, "<module>", "loss.backward()", users=True)
    model = Model(0, "Net", 5, True, True, "", (BucketStage("launched", 4, 4, ()),))
    flight = Flight(10, Collective("all_reduce", "float32 [32896]", 131_584), 12.2, "bucket 0 of Net")
    flights = GroupFlights("0", "shm", (), 10, 10, 1, {}, (flight,), 1)
    waiting = RankSnapshot(
        0, "running", seconds=12.0, stack=(line,), models=(model,), flights=(flights,), last_cell="a"
    )
    printed = str(HangReport.of([waiting, RankSnapshot(1, "idle", last_cell="a")]))
    [quoted] = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert printed.startswith(quoted)
