"""The guides tell today's truth: their names exist, their pictures and tables can be made, no variable is missing."""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree as ElementTree
from html import escape
from pathlib import Path

import pytest

import ddp_lab
import ddp_lab.comm
from ddp_lab.dashboard.views import VIEWS
from tests.unit.conftest import SITE, SiteModule

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = sorted(path.stem for path in (SITE / "how_to").glob("*.md"))
PAGES = [
    *sorted(f"guide/{path.name}" for path in (SITE / "guide").glob("*.md")),
    "troubleshooting.md",
    "faq.md",
    "gallery.md",
    "reference/configuration.md",
    *(f"how_to/{name}.md" for name in HOW_TO),
    *sorted(f"teach/{path.name}" for path in (SITE / "teach").glob("*.md")),
]
OWNERS = {
    "ddp_lab": ddp_lab,
    "lab": ddp_lab.Cluster,
    "lab.timeline": ddp_lab.Timeline,
    "model": ddp_lab.DistributedDataParallel,
    "ddp_lab.Timeline": ddp_lab.Timeline,
    "ddp_lab.Cluster": ddp_lab.Cluster,
    "ddp_lab.comm": ddp_lab.comm,
    "ddp_lab.faults": ddp_lab.faults,
    "ddp_lab.recording": ddp_lab.recording,
    "ddp_lab.fault_injection": ddp_lab.fault_injection,
}
_MADE_BY_INIT = {"timeline", "link", "module"}  # attributes of objects


def text(page: str) -> str:
    """What stands in a page's file."""
    return (SITE / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    """Whatever follows `lab.`, `lab.timeline.`, `model.` or `ddp_lab.` in code is an attribute of what is meant."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL))
    code += "\n".join(re.findall(r"`([^`\n]+)`", text(page)))
    missing = []
    for dotted in re.findall(r"(?<![\w.\"'/-])((?:lab|ddp_lab|model)(?:\.[A-Za-z_]\w*)+)", code):
        owner, _, name = dotted.rpartition(".")
        while owner and owner not in OWNERS:
            owner, _, name = owner.rpartition(".")
        if owner and name not in _MADE_BY_INIT and not hasattr(OWNERS[owner], name):
            missing.append(dotted)
    assert missing == []


@pytest.mark.parametrize("name", HOW_TO)
def test_how_tos_are_short_and_their_code_is_python(name: str) -> None:
    """A how-to has at most 100 lines, and its cells compile."""
    page = text(f"how_to/{name}.md")
    assert len(page.splitlines()) <= 100
    for cell in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        kept = "\n".join(line for line in cell.splitlines() if not line.lstrip().startswith("%"))
        compile(kept, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_dashboard_guide_has_every_view() -> None:
    """Each view is in the table of tabs, and each tab has a heading, a picture and a call."""
    page = text("guide/dashboard.md")
    tabs = re.findall(r'^\| \[([^]]+)\]\(#[\w-]+\) \| `"(\w+)"`', page, re.MULTILINE)
    assert {view for _, view in tabs} == set(VIEWS)
    for title, _ in tabs:
        part = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
        assert "<!-- picture: " in part, title
        assert re.search(r"`(?:lab|ddp_lab|model)\.", part), title


def test_pictures_are_made_from_what_is_recorded(site_module: SiteModule) -> None:
    """Each picture that a page names is SVG on a white sheet; the annotated one has a number for each kind of bar."""
    pictures = site_module("pictures")
    named = {name for page in PAGES for name in re.findall(r"^<!-- picture: (\w+) -->$", text(page), re.MULTILINE)}
    assert named == set(pictures.PICTURES)
    for name in named:
        drawn = pictures.PICTURES[name]()
        root = ElementTree.fromstring(drawn)
        assert float(root.attrib["width"]) > 300, name
        assert "fill='#fff'" in drawn, name
        assert "\n\n" not in drawn, name
    words = [node.text for node in ElementTree.fromstring(pictures.annotated()).iter() if node.text]
    rows = re.findall(r"^\| (\d) \| ", text("guide/dashboard.md"), re.MULTILINE)
    assert rows == [str(number) for number in range(1, 8)]
    assert set(rows) <= set(words)


def test_the_gallery_has_a_card_and_a_report_for_each_run(site_module: SiteModule, tmp_path: Path) -> None:
    """Each recording but lesson 12's has a card with a picture, and a report with its own title, its findings and
    a link back."""
    gallery = site_module("gallery")
    page = text("gallery.md")
    assert re.findall(r"^<!-- run: (\w+) -->$", page, re.MULTILINE) == list(gallery.RUNS)
    recordings = {path.stem for path in (ROOT / "tutorials" / "recordings").glob("*.npz")}
    recordings -= {"ranks-2", "ranks-4"}
    assert {shown.recording for shown in gallery.RUNS.values()} == recordings
    filled = gallery.filled(page)
    assert "<!-- run" not in filled
    gallery.write_reports(tmp_path)
    for name, shown in gallery.RUNS.items():
        assert filled.count(f'<a href="gallery/{name}.html">') == 2
        report = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert f"<h1>{shown.title}: DigitReader on 4 ranks</h1>" in report
        assert '<a href="../gallery.html">' in report
        assert all(escape(one.title) in report for one in shown.timeline().findings()), name
    drawn = [ElementTree.fromstring(one) for one in re.findall(r"<svg .*</svg>", filled)]
    assert len(drawn) == len(gallery.RUNS)
    assert not any(one.tag.endswith("text") for svg in drawn for one in svg.iter())
    assert len({ElementTree.tostring(svg) for svg in drawn}) == len(drawn)


def test_the_gallery_quotes_its_reports(site_module: SiteModule) -> None:
    """Each measured figure on the page, with its unit, is rounded from the summary or the finding of its run."""
    gallery = site_module("gallery")
    runs = {name: shown.timeline() for name, shown in gallery.RUNS.items()}

    def summary(name: str, pattern: str) -> int:
        [found] = re.findall(pattern, runs[name].summary())
        return round(float(found))

    step, exposed = r"([\d.]+) ms per step", r"([\d.]+) ms exposed communication"
    late = r"starts its backward late, by ([\d.]+) ms in 100 %"
    share = {name: round(run.findings()[0].gain_percent) for name, run in runs.items() if run.findings()}
    quoted = {
        "healthy": f"{summary('healthy', exposed)} of {summary('healthy', step)} ms",
        "slow_layer": f"{share['slow_layer']} % of the step",
        "late_rank": f"{summary('late_rank', late)} ms after the others",
        "tiny_buckets": f"{summary('tiny_buckets', exposed)} ms after the backward",
        "comm_hook": f"{summary('comm_hook', step)} ms instead of {summary('slow_network', step)}",
    }
    page = " ".join(text("gallery.md").split())
    _, *parts = re.split(r"<!-- run: (\w+) -->", page)
    cards = dict(zip(parts[::2], (part.partition(":::")[0] for part in parts[1::2]), strict=True))
    for name, phrase in quoted.items():
        assert phrase in cards[name]
    assert f"the bucket is too big, which costs {share['one_bucket']} % of the step" in page
    [unused] = [one for one in runs["unused"].assignment(0)["parameters"] if one["name"] == "old_head.weight"]
    assert (
        f"`old_head.weight` never gets a gradient, and yet its {round(unused['bytes'] / 2**20)} MiB" in cards["unused"]
    )


def test_printed_texts_are_those_that_the_page_explains(site_module: SiteModule) -> None:
    """The worked example prints what its page says of it."""
    pictures = site_module("pictures")
    page = text("guide/performance.md")
    named = re.findall(r"^<!-- printed: (\w+) -->$", page, re.MULTILINE)
    assert set(named) == set(pictures.PRINTED)
    printed = {name: make() for name, make in pictures.PRINTED.items()}
    assert "81.2 ms per step" in printed["summary"]
    assert "parameter='layer3.bias'" in printed["stragglers"]
    assert "(about 16.0 % of the step" in printed["findings"]
    assert re.search(r"without rank 2's delay +62\.\d ms", printed["what_if"])
    assert "-24.2 %" in printed["compare"]
    assert "exposed 17.62 →" in printed["compare"]
    filled = pictures.filled(page)
    assert "<!-- printed" not in filled
    assert "<!-- picture" not in filled


def test_the_configuration_page_has_every_option(site_module: SiteModule) -> None:
    """Tables are made from the code: each has rows, and each argument of a cluster is one of them."""
    option_tables = site_module("option_tables")
    page = text("reference/configuration.md")
    named = re.findall(r"^<!-- options of (.+) -->$", page, re.MULTILINE)
    assert {"Cluster", "DistributedDataParallel", "%cluster start", "%%distributed", "ddp-lab run"} <= set(named)
    for name in named:
        lines = option_tables.table(name).splitlines()
        assert len(lines) > 2, name
        assert all(re.fullmatch(r"\| `.+` \| .+ \| .+ \|", line) for line in lines[2:]), name
    cluster = option_tables.table("Cluster")
    assert "| `idle_timeout` | `3600.0` |" in cluster
    assert "| `--idle-timeout, --lease S` | 3600 |" in option_tables.table("%cluster start")
    assert "<!-- options" not in option_tables.filled(page)


def test_no_environment_variable_is_missing() -> None:
    """Each variable that the package reads, and each DDP_LAB_ one anywhere, is on the configuration page."""
    page = text("reference/configuration.md")
    read = set()
    for path in (ROOT / "ddp_lab").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "bench" not in path.parts:  # which sets them for its own processes
            read |= variables(ast.parse(source))
    ours = set()
    for path in [*(ROOT / "ddp_lab").rglob("*.py"), *(ROOT / "csrc").rglob("*.*"), ROOT / "setup.py"]:
        if path.suffix in (".py", ".h", ".cpp"):
            ours |= set(re.findall(r"DDP_LAB_[A-Z_]+", path.read_text(encoding="utf-8")))
    ours -= {"DDP_LAB_OLDER", "DDP_LAB_OURS"}  # macros
    assert {"DDP_LAB_SHARED_MEMORY", "DDP_LAB_HOST_ID", "CUDA_VISIBLE_DEVICES", "TORCH_FR_BUFFER_SIZE"} <= read | ours
    assert [name for name in sorted(read | ours) if f"`{name}`" not in page and f"`{name}=" not in page] == []


def variables(tree: ast.Module) -> set[str]:
    """The names of the environment variables that a module reads, where they stand in it as texts."""
    known = {
        target.id: one.value.value
        for one in tree.body
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    places = ("os.environ", "environment")
    calls = {f"{place}.{verb}" for place in places for verb in ("get", "setdefault", "pop")} | {"os.getenv", "_number"}
    found = set()
    for node in ast.walk(tree):
        asked: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in places:
            asked = node.slice
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in calls and node.args:
            asked = node.args[0]
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            asked = node.left
        if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
            found.add(asked.value)
        elif isinstance(asked, ast.Name) and asked.id in known:
            found.add(known[asked.id])
    return found


def test_the_glossary_has_the_vocabulary() -> None:
    """Each word of ARCHITECTURE.md's vocabulary is a term of the glossary."""
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## Vocabulary")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    terms = set(re.findall(r"^(\w[\w ]*)$", (SITE / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE))
    words = {word.strip() for row in rows for word in row.split(",")}
    words = words - {"hidden", "exposed communication"} | {"hidden communication", "exposed communication"}
    assert words - terms == set()
