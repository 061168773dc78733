"""The documentation site builds without a warning, its links lead somewhere, and it asks no network for anything."""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.benchmarks.browser import chromium, chromium_browser
from tests.waiting import wait_until

pytestmark = pytest.mark.soak  # `.ci/run` builds the site, too, and any warning fails it

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "tutorials" / "site"
NOT_SEARCHED = ("CHANGELOG", "tutorials/site/inside", "tutorials/site/descriptions", "tutorials/site/teach/notes")
_FROM_ELSEWHERE = re.compile(r"(?:https?:)?//")
_IN_STYLES = re.compile(r"@import|url\(\s*[\"']?(?:https?:)?//")


class Page(HTMLParser):
    """What a page refers to: `links` are followed by the reader, `parts` are fetched by the browser."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.parts: list[str] = []
        self.anchors: set[str] = set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            follows = tag == "a" or (tag == "link" and given.get("rel") in ("index", "search", "next", "prev"))
            (self.links if follows else self.parts).append(given["href"])
        self.parts += [given[name] for name in ("src", "srcset", "data", "poster") if name in given]
        self.parts += _IN_STYLES.findall(given.get("style", ""))
        if tag == "meta" and given.get("http-equiv") == "refresh":
            self.links.append(given["content"].partition("url=")[2])


@pytest.fixture(scope="module")
def pages(demo: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages that `make site` builds, by path. Of all notebooks one was run: the quickstart, by the demo."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    run = folder.parent / "executed" / "notebooks" / "quickstart.ipynb"
    run.parent.mkdir(parents=True)
    shutil.copy(demo[1] / "quickstart.ipynb", run)
    places = [f"DOCS={folder}", f"EXECUTED={run.parents[1]}", f"BIN={Path(sys.executable).parent}"]
    command = ["make", "--no-print-directory", "site", *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"the first page is {folder}/index.html"
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


def test_links_and_pictures_exist(pages: dict[Path, Page]) -> None:
    """Every link inside of the site leads to a file of it, and to an anchor that is there; so does every picture."""
    missing = []
    for path, page in pages.items():
        for target in page.links + page.parts:
            if _FROM_ELSEWHERE.match(target) or target.startswith(("data:", "mailto:", "javascript:")):
                continue
            name, anchor = urldefrag(target)
            found = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            if not found.is_file() or (anchor and found in pages and unquote(anchor) not in pages[found].anchors):
                missing.append(f"{path.name}: {target}")
    assert missing == []


def test_nothing_is_fetched(pages: dict[Path, Page]) -> None:
    """No page asks the network for a script, font, style or picture."""
    assert [f"{path.name}: {part}" for path, page in pages.items() for part in page.parts if "//" in part] == []
    folder = next(path.parent for path in pages if path.name == "index.html" and path.parent.name == "docs")
    styles = [path for path in folder.rglob("*.css") if _IN_STYLES.search(path.read_text(encoding="utf-8"))]
    assert styles == []
    written = [style for page in pages.values() for style in re.findall(r"<style.*?</style>", page.text, re.DOTALL)]
    assert not any(_IN_STYLES.search(style) for style in written)


def test_solutions_and_answers_are_folded(pages: dict[Path, Page]) -> None:
    """Each lesson and notebook is a page; each of its solutions is folded, and so is each answer to a question, whose
    text is Markdown no more."""
    by_name = {path.relative_to(path.parents[1]).as_posix(): page for path, page in pages.items()}
    for notebook in [*ROOT.glob("tutorials/*.ipynb"), *ROOT.glob("notebooks/*.ipynb")]:
        page, source = by_name[f"{notebook.parent.name}/{notebook.stem}.html"], notebook.read_text(encoding="utf-8")
        assert page.text.count("Show the solution") == len(set(re.findall(r'"solution-(\d+)"', source))), notebook
        answers = re.findall(r"<details><summary><b>Answer</b></summary>(.*?)</details>", page.text, re.DOTALL)
        assert len(answers) == source.count("<b>Answer</b>")
        assert all(answer.lstrip().startswith("<p>") for answer in answers)


def test_the_first_page_says_where_to_begin(pages: dict[Path, Page]) -> None:
    """Above the picture there is something to do; four tiles lead on; each lesson of the list has a sentence."""
    [first] = [page.text for path, page in pages.items() if path.match("site/index.html")]
    call, picture, tiles = (first.index(part) for part in ('class="call', "dashboard-light.gif", 'class="tiles'))
    assert call < picture < tiles
    assert first.count('class="tile ') == 4
    learn = (SITE / "learn.md").read_text(encoding="utf-8")
    told = re.findall(r"^- \[(?:Lesson|Appendix) (\w+): [^]]+\]\(\.\./(\w+)\.ipynb\) – \S.*\.$", learn, re.MULTILINE)
    lessons = sorted(path.stem for path in ROOT.glob("tutorials/*.ipynb"))
    assert [(number, stem) for number, stem in told] == [(stem.split("_")[0].lstrip("0"), stem) for stem in lessons]


ANSWERS = {
    "hang": "how_to/hang",
    "watchdog": "how_to/nccl_timeout",
    "bucket_cap_mb": "how_to/bucket_size",
    "install": "get_started/installation",
    "stop": "how_to/stop",
    "resume": "how_to/checkpoint",
    "slurm": "how_to/slurm",
    "accelerate launch": "how_to/trainers",
}
_RESULTS = """() => [...document.querySelectorAll("#search-results ul.search > li > a")]
  .map((link) => link.getAttribute("href").split("#")[0])"""


class _Quiet(SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    """Says nothing of answers that a browser did not wait for."""

    def handle_error(self, *_: Any) -> None:
        pass


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address of a folder: a page that is opened as a file can't ask for others."""
    with _Server(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(chromium() is None, reason="no Chromium (make browser)")
def test_the_search_finds_the_page_that_answers(pages: dict[Path, Page]) -> None:
    """A reader's word lists the page with the answer among the first three, and never a page for developers."""
    folder = next(path.parent for path in pages if path.match("docs/index.html"))
    late, others = {}, set()
    with _served(folder) as address, chromium_browser() as browser:
        page = browser.new_page()
        for asked, answer in ANSWERS.items():
            page.goto(f"{address}/search.html?q={asked}")
            wait_until(lambda: page.text_content("#search-results h2") == "Search Results", f"{asked} was searched")
            found = page.evaluate(_RESULTS)
            others |= set(found) & {f"{name}.html" for name in NOT_SEARCHED}
            if f"tutorials/site/{answer}.html" not in found[:3]:
                late[asked] = found[:8]
    assert late == {}
    assert others == set()


def test_a_page_has_what_its_notebook_showed(pages: dict[Path, Page]) -> None:
    """Printed lines, plotly figures that work with a script of the site, and pictures in the place of live views."""
    [page] = [page for path, page in pages.items() if path.name == "quickstart.html"]
    assert "held-out accuracy" in page.text
    assert page.parts.count("../_static/plotly.min.js") == 1
    assert page.text.count("Plotly.newPlot(") == 2
    assert page.text.count('src="data:image/svg+xml;base64,') == 1
    assert "widget-view" not in page.text
    assert "the live view; its last picture follows" not in page.text


def test_what_has_changed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells that have changed since they ran are run again; if one fails no run is kept; a reader's own is let be."""
    monkeypatch.syspath_prepend(str(SITE))
    outputs = importlib.import_module("outputs")
    monkeypatch.setattr(outputs, "_ROOT", tmp_path)
    executed = tmp_path / "executed"
    run = executed / "notebooks" / "quickstart.ipynb"
    (tmp_path / "notebooks").mkdir()

    def build(cell: str, name: str = "quickstart") -> str:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
        outputs.main(executed)
        return capsys.readouterr().out

    assert "running notebooks/quickstart.ipynb: " in build("print(6 * 7)")
    assert nbformat.read(run, 4).cells[0].outputs[0].text == "42\n"
    assert build("1 / 0", "Untitled") == ""
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        build("1 / 0")
    assert nbformat.read(run, 4).cells[0].source == "print(6 * 7)"


def test_public_names_are_documented(pages: dict[Path, Page]) -> None:
    """Each public name has an entry in the API reference (methods: tests/unit/test_reference.py)."""
    import ddp_lab

    anchors = set().union(*(page.anchors for path, page in pages.items() if path.parent.name == "api"))
    modules = {"fault_injection", "faults", "recording"}
    expected = {f"module-ddp_lab.{name}" for name in modules | {"comm", "errors"}}
    for name in set(ddp_lab.__all__) - modules:
        if not name.endswith("extension") and not name.startswith("__"):
            expected.add(f"ddp_lab.errors.{name}" if f"ddp_lab.errors.{name}" in anchors else f"ddp_lab.{name}")
    for name in ("enable", "disable", "mark", "save", "statistics"):
        expected.add(f"ddp_lab.recording.{name}")
    assert expected - anchors == set()
