"""Ranks that print much, and progress bars of real ranks."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ddp_lab.output.board import OutputBoard
from tests.cluster.conftest import Lab
from tests.cluster.pages import Page

_BARS = """
from {module} import tqdm
for epoch in tqdm(range(2), desc="epochs", mininterval=0):
    for batch in tqdm(range(50), desc="batches", leave=False, mininterval=0):
        pass
    tqdm.write(f"epoch {{epoch}} is over")
with tqdm(total=40, desc="own", mininterval=0) as bar:
    bar.update(10 + 5 * rank)
    bar.set_postfix(loss=rank / 4)
"""


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_bars_of_ranks_are_merged(lab: Lab, module: str) -> None:
    """Each bar of tqdm is one line for all ranks, whatever tqdm's module; counts that differ are told as a range."""
    page = Page()
    lab.run(_BARS.format(module=module), board=OutputBoard(page))
    lines = page.text.split("\n")
    (epochs,) = [line for line in lines if "epochs: 100%" in line]
    (own,) = [line for line in lines if "own:" in line]
    assert epochs.startswith("ranks 0–1 ┃ ") or epochs.startswith("          ┃ ")
    assert "own:  25%|██▒       | 10..15/40 [" in own
    assert ", loss=0..0.25]" in own
    assert [line.split("│ ")[1] for line in lines if "is over" in line] == ["epoch 0 is over", "epoch 1 is over"]
    assert not [line for line in lines if "batches" in line]


def test_a_flood_is_shown_in_part_and_kept_whole(lab: Lab) -> None:
    """Of 30,000 lines of two ranks five hundred are shown; logs and result have them all, and only their owner has."""
    page = Page()
    code = "for i in range(15_000): print(f'line {i} of rank {rank}' if rank else f'line {i}')\n'the end'"
    result = lab.run(code, board=OutputBoard(page))
    lines = page.text.split("\n")
    assert len(lines) <= 502
    (note,) = [line for line in lines if "not shown" in line]
    assert str(result.logs[1]).replace("rank-1", "rank-*") in note
    for rank in (0, 1):
        expected = "".join(f"line {i}" + (" of rank 1\n" if rank else "\n") for i in range(15_000)) + "'the end'\n"
        assert result.text(rank) == expected
        assert result.logs[rank].read_text() == expected
        assert stat.S_IMODE(result.logs[rank].stat().st_mode) == 0o600
    assert stat.S_IMODE(result.logs[0].parent.stat().st_mode) == 0o700


def test_a_log_that_cannot_be_written_costs_nothing(lab: Lab, tmp_path: Path) -> None:
    """Where the folder for logs can't be made, outputs stay in memory, and the page says why there is no log."""
    (tmp_path / "file").touch()
    logs, lab.session.processes.logs = lab.session.processes.logs, tmp_path / "file" / "outputs"
    try:
        page = Page()
        result = lab.run("for i in range(3_000): print(i)", board=OutputBoard(page))
    finally:
        lab.session.processes.logs = logs
    assert result.logs == {}
    assert "the cell's result has them all (no log: " in page.text
    assert result.text(1) == "".join(f"{i}\n" for i in range(3_000))
