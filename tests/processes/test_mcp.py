"""`ddp-lab mcp`: recordings for assistants, without a cluster; what a missing library and wrong options say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.assistants.timeline_tools import Recording
from ddp_lab.cli.main import main
from ddp_lab.protocol.events import Batch
from tests.assistants import assistant, text_of
from tests.journals import batch, opening, written
from tests.training_events import Training
from tests.unit.conftest import SITE

RUNS = SITE.parent / "recordings"


def test_a_recording_is_served_without_a_cluster() -> None:
    """A saved run gives its summary, findings, predictions and a report; no tool that needs ranks is offered.

    The report is a new private page whose path comes back; the recording's folder is not written to.
    """
    before = sorted(RUNS.iterdir())
    changes = ({}, {"bandwidth_gb_s": 0.01}, {"world_size": 16})
    with assistant("--recording", str(RUNS / "run-1.npz")) as asked:
        assert asked.tools().keys() == {"timeline_summary", "findings", "what_if", "report"}
        results = [asked.call(name) for name in ("timeline_summary", "findings", "report")]
        results += [asked.call("what_if", **one) for one in changes]
    summary, found, report, same, slower, wider = (one.structured_content or {} for one in results)
    assert summary
    assert [one["kind"] for one in found["findings"]] == [
        one.kind for one in Recording(RUNS / "run-1.npz").read().timeline.findings()
    ]
    assert same["change_percent"] == pytest.approx(0, abs=1e-6)
    assert slower["step_ms"] > same["step_ms"]
    assert f"({wider['change_percent']:+.1f} %)" in text_of(results[-1])
    assert "16 ranks" in text_of(results[-1])
    page = Path(report["path"])
    assert "</html>" in page.read_text(encoding="utf-8")
    shutil.rmtree(page.parent)
    assert sorted(RUNS.iterdir()) == before


def test_a_run_that_grows_is_read_again(tmp_path: Path) -> None:
    """The folder of a job that still runs shows what its ranks have written until then."""
    journal = tmp_path / "rank0.journal"
    journal.write_bytes(written([opening()]))
    recording = Recording(tmp_path)
    assert recording.read() is recording.read()
    assert recording.read().timeline.ranks()[0].events == 0
    events = Training(ranks=1).step(0)[0]
    journal.write_bytes(written([opening(), batch(Batch(0, 1, 0, 0, events))]))
    assert recording.read().timeline.ranks()[0].events == len(events)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--recording", "nowhere"], 1, "nowhere does not exist"),
        (["--recording", __file__], 1, "not a saved timeline"),
        (["--recording", "run", "--allow-run"], 2, "--recording serves files"),
        (["--process", "x"], 2, "--process"),
    ],
)
def test_wrong_options(options: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording that can't be read, and options that exclude each other, are named in a line."""
    try:
        ended = main(["mcp", *options])
    except SystemExit as error:
        ended = error.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert (ended, words in said) == (code, True)
    assert "Traceback" not in said


def test_it_ends_with_its_input() -> None:
    """When the assistant closes the input, the command ends. Without the library a sentence says how to install it."""
    code = (
        "import sys; from ddp_lab.cli.main import main; sys.modules['mcp'] = None; first = main(['mcp']);"
        " del sys.modules['mcp']; print(first, main(['mcp']))"
    )
    done = subprocess.run([sys.executable, "-c", code], input="", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (0, "1 0\n", 1)
    assert "pip install 'ddp_lab[mcp]'" in done.stderr
