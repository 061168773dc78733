"""The quickstart, run as a first-time reader would: real ranks, real training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import running


@pytest.fixture(scope="module")
def executed(demo: tuple[str, Path]) -> running.Notebook:
    """The quickstart after "Run all"."""
    return running.read(demo[1] / "quickstart.ipynb")


def _training(executed: running.Notebook) -> str:
    return running.text(running.cell(executed, "train-model"))


def test_reads_digits(executed: running.Notebook) -> None:
    """The network reads at least 97 % of the held-out images."""
    [accuracy] = re.findall(r"held-out accuracy: ([\d.]+)%", running.text(running.cell(executed, "held-out")))
    assert float(accuracy) >= 97.0


def test_all_ranks_tell_their_loss(executed: running.Notebook) -> None:
    """Each rank prints a loss for every epoch; the client draws all curves."""
    told, ranks = [], ""
    # Of several lines of a rank that arrive together the first alone names it; of equal ones all ranks are named.
    for named, epoch, loss in re.findall(
        r"(?:ranks? ([\d–]+)\S*| +) │ epoch +(\d+): loss ([\d.]+)", _training(executed)
    ):
        ranks = named or ranks
        told += [(rank, epoch, loss) for rank in ranks.split("–")]
    epochs = {rank: [int(epoch) for of, epoch, _ in told if of == rank] for rank in ("0", "1")}
    assert epochs["0"] == epochs["1"] == list(range(1, 13))
    assert float(told[-1][2]) < 0.1 < 0.5 < float(told[0][2])
    curves = running.figure(running.cell(executed, "plot-losses"))
    assert [trace["name"] for trace in curves["data"]] == ["rank 0", "rank 1"]


def test_gradients_equal(executed: running.Notebook) -> None:
    """The gradients are equal, to the bit, on all ranks and with torch's DDP."""
    told = running.text(running.cell(executed, "compare"))
    assert "bit-equal to torch's DDP: True" in told
    assert "bit-equal on all ranks: True" in told
    assert "ranks 0–1" in told, "both ranks say so"


def test_dashboard_is_kept(executed: running.Notebook) -> None:
    """The training cell shows the dashboard, and a picture that needs no kernel."""
    cell = running.cell(executed, "train-model")
    assert running.WIDGET in running.mime_types(cell)
    pages = [output.data.get("text/html", "") for output in cell.outputs if output.output_type != "stream"]
    assert any("<img" in page and 'alt="DigitReader on 2 ranks' in page for page in pages)


def test_timeline_is_told_in_words(executed: running.Notebook) -> None:
    """The closing cell says which bucket was exposed and how much communication overlapped, and shows the table."""
    told = running.text(running.cell(executed, "in-words"))
    assert re.search(r"DigitReader on 2 ranks, steps \d+–\d+: [\d.]+ ms per step", told)
    assert re.search(r"4 buckets \([\d.]+ KiB\) per step", told)
    assert re.search(r"\d+ % of the communication overlapped", told)
    assert re.search(r"Bucket \d \([^)]+ and \d more\) has the most exposed communication, [\d.]+ ms", told)
    assert "No event was dropped." in told
    assert "text/html" in running.mime_types(running.cell(executed, "in-words"))
    assert len(running.figure(running.cell(executed, "figure"))["data"]) >= 3
