"""The benchmarks that open a browser, as short as they can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.__main__ import run


def _found(benchmark: str, folder: Path, *asked: str) -> dict[str, Any]:
    """What a benchmark writes as JSON."""
    path = folder / "found.json"
    assert run(benchmark, [*asked, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_shared")
@pytest.mark.parametrize("senders", [0, 6])
def test_the_dashboard(tmp_path: Path, capsys: pytest.CaptureFixture[str], senders: int) -> None:
    """Ranks that train, or six that are replayed over the wire, are shown, and their finished steps with a delay."""
    asked = ["--ranks", "2", "--senders", str(senders), "--buckets", "4", "--seconds", "3"]
    found = _found("widget", tmp_path, *asked)
    assert found["shape"] == [senders or 2, 4]
    assert found["updates_per_second"] > 0
    assert found["steps_per_second"] > 0
    assert 0 < found["latency_ms"] <= found["latency_ms_90"]
    assert ("6 ranks replayed over the wire while 2 train" in capsys.readouterr().out) == (senders == 6)


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_shared")
def test_the_page_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made-up steps are drawn, and what they cost the browser is counted."""
    found = _found("page", tmp_path, "--ranks", "2", "--buckets", "4", "--seconds", "2")
    assert found["updates_per_second"] > 0
    assert found["cpu_ms"] > 0
    assert "2 ranks, 4 buckets, tab Timeline" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_shared")
def test_what_a_dashboard_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the dashboard and two views open, recording on is compared with off, and off with itself."""
    found = _found("dashboard", tmp_path, "--model", "conv_net", "--rounds", "3", "--views", "overlap", "findings")
    assert found["events"] > 10
    assert found["share"] == pytest.approx(found["events"] * found["ns"] / (1e6 * found["step_ms"]))
    assert found["on / off"]["pairs"] == found["off again / off"]["pairs"] == 3
    assert "off again / off" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_shared")
def test_ranks_that_print_without_pause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what two ranks print a bounded part is on the page, which keeps drawing, and no line is lost."""
    found = _found("output", tmp_path, "--ranks", "2", "--rate", "500", "--seconds", "3")
    assert {one["printed"] for one in found["of_ranks"].values()} == {1_500}
    assert all(one["log_whole"] and one["result_whole"] for one in found["of_ranks"].values())
    assert found["shown"] == 501
    assert "2,502 lines not shown" in found["note"]
    assert found["printing"]["frames"] > 1
    assert "every line in order in log and result: True" in capsys.readouterr().out
