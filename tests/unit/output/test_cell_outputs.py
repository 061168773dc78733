"""Where a cell's outputs are kept: in memory, then in logs."""

from __future__ import annotations

import copy
import stat
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_lab.output.logs import LINES_IN_MEMORY, CellOutputs

FIGURE = {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "<Figure>"}, "metadata": {}}


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def joined(outputs: Any) -> list[dict[str, Any]]:
    """Outputs with the text of a stream that follows itself put together."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] == "stream" and found and found[-1].get("name") == output["name"]:
            found[-1] = {**output, "text": found[-1]["text"] + output["text"]}
        else:
            found.append(output)
    return found


def test_little_stays_in_memory(tmp_path: Path) -> None:
    """A cell that prints little makes no file. Where no log can be written, everything stays in memory, and `where`
    says why."""
    outputs = CellOutputs([0, 1], tmp_path / "logs", "1")
    outputs.add(1, stream("one\n"))
    assert outputs.by_rank() == {0: [], 1: [stream("one\n")]}
    assert outputs.logs() == {}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    outputs = CellOutputs([0], tmp_path / "file" / "logs", "1")
    text = stream("x\n" * 1_000)
    outputs.add(0, text)
    outputs.add(0, text)
    assert outputs.by_rank()[0] == [text, text]
    assert outputs.where().startswith("the cell's result has them all (no log: ")


def test_much_goes_to_logs_of_all_ranks(tmp_path: Path) -> None:
    """Once there is much, every rank has a log with all its text from the beginning, for its owner only."""
    outputs = CellOutputs([0, 1], tmp_path / "logs", "1")
    outputs.add(0, stream("of 0\n"))
    outputs.add(0, FIGURE)
    outputs.add(1, stream("x\n" * (LINES_IN_MEMORY + 1)))
    outputs.add(0, stream("warned\n", "stderr"))
    logs = outputs.logs()
    assert logs[0].read_text() == "of 0\n<Figure>\nwarned\n"
    assert logs[1].read_text() == "x\n" * (LINES_IN_MEMORY + 1)
    assert list(outputs.by_rank()[0]) == [stream("of 0\n"), FIGURE, stream("warned\n", "stderr")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "logs").iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700
    assert str(logs[0]).replace("rank-0", "rank-*") in outputs.where()


def test_outputs_are_a_sequence_that_can_be_copied(tmp_path: Path) -> None:
    """Outputs in a log can be indexed, sliced, counted and copied as a list's, also when the log is gone."""
    outputs = CellOutputs([0], tmp_path / "logs", "1")
    for number in range(3):
        outputs.add(0, stream(f"{number}\n" * LINES_IN_MEMORY))
        outputs.add(0, FIGURE)
    found = outputs.by_rank()[0]
    outputs.logs()[0].unlink()
    assert len(found) == 6
    assert found[-1] == FIGURE
    assert found[::2] == [stream(f"{number}\n" * LINES_IN_MEMORY) for number in range(3)]
    assert copy.deepcopy(found) == list(found)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.builds(stream, st.text(st.characters(), max_size=8), st.sampled_from(["stdout", "stderr"])),
            st.just(FIGURE),
        )
    ),
    st.integers(0, 20),
)
def test_every_output_comes_back(tmp_path: Path, given_outputs: list[dict[str, Any]], place: int) -> None:
    """Whatever text comes, in whatever order, and whenever the log begins, the outputs are those that came."""
    for path in tmp_path.glob("logs/*"):
        path.unlink()
    flood = stream("\n" * (LINES_IN_MEMORY + 1))
    given_outputs.insert(place, flood)
    outputs = CellOutputs([0], tmp_path / "logs", "1")
    for output in given_outputs:
        outputs.add(0, output)
    assert joined(outputs.by_rank()[0]) == joined(given_outputs)
