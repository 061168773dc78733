"""`ddp-lab mcp`: recordings for assistants, without a cluster; what a missing library and wrong options say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.assistants.timeline_tools import Recording
from ddp_lab.protocol.events import Batch
from tests.assistants import Assistant, text_of
from tests.journals import batch, opening, written
from tests.training_events import Training
from tests.unit.conftest import SITE

RUNS = SITE.parent / "recordings"


def test_a_recording_is_served_without_a_cluster() -> None:
    """A saved run gives its summary, findings and predictions; tools that need ranks are not offered."""
    assistant = Assistant("--recording", str(RUNS / "run-1.npz"))
    assert set(assistant.tools()) == {"timeline_summary", "findings", "what_if", "report"}
    summary = assistant.call("timeline_summary").structured_content
    assert summary is not None
    found = assistant.call("findings").structured_content
    assert found is not None
    assert [one["kind"] for one in found["findings"]] == sorted_kinds(RUNS / "run-1.npz")
    same, slower = (assistant.call("what_if", **change) for change in ({}, {"bandwidth_gb_s": 0.01}))
    assert same.structured_content is not None
    assert slower.structured_content is not None
    assert same.structured_content["change_percent"] == pytest.approx(0, abs=1e-6)
    assert slower.structured_content["step_ms"] > same.structured_content["step_ms"]


def sorted_kinds(path: Path) -> list[str]:
    """The kinds of the findings in a recording, in their order."""
    return [one.kind for one in Recording(path).read().timeline.findings()]


def test_a_report_of_a_recording() -> None:
    """The report is a new private page whose path comes back; the recording's folder is not written to."""
    before = sorted(RUNS.iterdir())
    answered = Assistant("--recording", str(RUNS / "run-2.npz")).call("report").structured_content
    assert answered is not None
    page = Path(answered["path"])
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


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with an input that is empty."""
    return subprocess.run(words, input="", capture_output=True, text=True, check=False, env=os.environ)


def test_without_the_library() -> None:
    """Without the `mcp` library one sentence says how to install it."""
    code = "import sys; sys.modules['mcp'] = None; from ddp_lab.cli.main import main; sys.exit(main(['mcp']))"
    done = ran(sys.executable, "-c", code)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "pip install 'ddp_lab[mcp]'" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--recording", "nowhere"], 1, "nowhere does not exist"),
        (["--recording", __file__], 1, "not a saved timeline"),
        (["--recording", "run", "--allow-run"], 2, "--recording serves files"),
        (["--process", "x"], 2, "--process"),
    ],
)
def test_wrong_options(options: list[str], code: int, words: str) -> None:
    """A recording that can't be read, and options that exclude each other, are named in a line."""
    done = ran(sys.executable, "-m", "ddp_lab", "mcp", *options)
    assert (done.returncode, words in done.stderr) == (code, True)
    assert "Traceback" not in done.stderr


def test_it_ends_with_its_input() -> None:
    """When the assistant closes the input, the command ends."""
    done = ran(sys.executable, "-m", "ddp_lab", "mcp")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_tools_text_is_what_the_facts_say() -> None:
    """The text of a prediction has the numbers of its data."""
    result = Assistant("--recording", str(RUNS / "run-3.npz")).call("what_if", world_size=16)
    facts = result.structured_content
    assert facts is not None
    assert f"({facts['change_percent']:+.1f} %)" in text_of(result)
    assert "16 ranks" in text_of(result)
