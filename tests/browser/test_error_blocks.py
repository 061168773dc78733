"""What a notebook shows of errors, in a real JupyterLab: colours that read, no frames of ours, links that lead on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_lab.diagnosis.rules import HANGS
from tests.benchmarks.browser import Lab, NotebookPage
from tests.browser.conftest import Shared
from tests.waiting import wait_until

FAILED = """
from ddp_lab.cluster.cells.failures import cell_error, failure_of
from ddp_lab.protocol.messages import CellReport
try:
    text = f"a {'text'!r}"  # a comment
    None + len(text)
except TypeError as error:
    shell = get_ipython()
    trace = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
report = CellReport(False, name="TypeError", message="no", traceback=trace, brief=trace, time_ns=1)
raise cell_error({1: failure_of(1, report)}, "train [3]")
"""
WRONG = """
%load_ext ddp_lab
import ddp_lab
def mine():
    return ddp_lab.Cluster(2, backend="carrier pigeon")
mine()
"""
STOPPED = 'ddp_lab.Cluster(2, backend="gloo").inject(ddp_lab.faults.SlowRank(1, 0.002))'
MAGIC = "%cluster use nobody"
DOCTOR = """
from ddp_lab.diagnosis.report import HangReport
from ddp_lab.diagnosis.rules import Diagnosis
HangReport(Diagnosis("busy", "rank 0 is in `time.sleep(600)`", "`%cluster interrupt` ends <that>"), ())
"""
# The smallest contrast of a text of the output of a cell, over all that lies behind it.
CONTRAST = """(index) => {
  const parsed = (css) => { const [r, g, b, a = 1] = css.match(/[\\d.]+/g).map(Number); return [r, g, b, a] };
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
  const behind = (node) => {
    const own = parsed(getComputedStyle(node).backgroundColor);
    return own[3] === 1 || !node.parentElement ? own.slice(0, 3) : over(own, behind(node.parentElement));
  };
  const output = window.jupyterapp.shell.currentWidget.content.widgets[index].node.querySelector('.jp-OutputArea');
  const walk = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    if (!walk.currentNode.data.trim()) continue;
    const node = walk.currentNode.parentElement, ground = behind(node);
    const pair = [light(over(parsed(getComputedStyle(node).color), ground)), light(ground)];
    found.push([(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), walk.currentNode.data.trim()]);
  }
  return found.sort((one, other) => one[0] - other[0]);
}"""
OUTPUT = ".jp-Notebook-cell >> nth={} >> .jp-OutputArea"


@pytest.fixture(scope="module")
def notebook(shared: Shared, lab: Lab) -> Iterator[NotebookPage]:
    """A notebook whose cells have ended with the errors, beside the lesson that the doctor names."""
    lesson = lab.notebooks / HANGS
    lesson.parent.mkdir(exist_ok=True)
    lesson.write_text((Path(__file__).resolve().parents[2] / HANGS).read_text())
    with shared.notebook(FAILED, WRONG, DOCTOR, STOPPED, MAGIC, run=5) as shown:
        yield shown
    shutil.rmtree(lesson.parent)


def test_an_error_can_be_read_in_both_themes(notebook: NotebookPage) -> None:
    """Each text of a rank's error and of that of an argument has a contrast of at least 4.5 on JupyterLab's ground."""
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.set_theme(theme)
        for cell, words in ((0, {"rank 1 failed", "TypeError"}), (1, {"ValueError"})):
            found = notebook.page.evaluate(CONTRAST, cell)
            assert words <= {text for _, text in found}
            assert found[0][0] >= 4.5, (theme, found[:3])


def test_a_call_that_is_refused_shows_no_frame_of_ours(notebook: NotebookPage) -> None:
    """The user's own frames, down to the call, and the message: what lies below the call is left out; also where the
    cluster is the cause."""
    text = notebook.page.locator(OUTPUT.format(1)).inner_text()
    assert 'ddp_lab.Cluster(2, backend="carrier pigeon")' in text
    assert "in mine()" in text
    assert "ValueError: " in text
    assert "cluster.py" not in text
    text = notebook.page.locator(OUTPUT.format(3)).inner_text()
    assert "SlowRank(1, 0.002)" in text
    assert "ClusterError: no rank has a model yet" in text
    assert "models.py" not in text
    text = notebook.page.locator(OUTPUT.format(4)).inner_text()
    assert text.strip().startswith("ClusterError: no cluster 'nobody' is running in this notebook")


def test_the_doctors_lesson_opens(notebook: NotebookPage) -> None:
    """What stands in backticks is set as code, and the lesson is a link that JupyterLab opens, at its heading."""
    output = notebook.page.locator(OUTPUT.format(2))
    assert output.locator("code").all_inner_texts() == ["time.sleep(600)", "%cluster interrupt"]
    assert "ends <that>" in output.inner_text()
    resolved = f"/files/{HANGS}"  # JupyterLab's own, for a link to a file that its server has
    link = output.locator("a")
    wait_until(lambda: resolved in str(link.get_attribute("href")), "the link")
    assert str(link.get_attribute("href")).endswith("#A-busy-rank")
