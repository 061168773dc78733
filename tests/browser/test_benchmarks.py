"""The benchmarks that open a browser, as short as they can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import run

# Benchmark and options -> what of its JSON is positive, and what it prints.
BENCHMARKS = {
    "widget --ranks 2 --senders 0 --buckets 4 --seconds 3": (("updates_per_second", "steps_per_second"), ""),
    "widget --ranks 2 --senders 6 --buckets 4 --seconds 3": (("latency_ms", "latency_ms_90"), "6 ranks replayed"),
    "page --ranks 2 --buckets 4 --seconds 2": (("updates_per_second", "cpu_ms"), "2 ranks, 4 buckets, tab Timeline"),
    "dashboard --model conv_net --rounds 3 --views overlap": (("events", "share"), "off again / off"),
    "output --ranks 2 --rate 500 --seconds 3": (("shown",), "every line in order in log and result: True"),
}


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_shared")
@pytest.mark.parametrize("command", BENCHMARKS)
def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """It ends, prints its table, and writes its figures."""
    (benchmark, *options), (figures, words) = command.split(), BENCHMARKS[command]
    assert run(benchmark, [*options, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(found[name] > 0 for name in figures), found
    assert words in capsys.readouterr().out
