"""The commands `ddp-lab bench step | observe | memory | construct`, on as little as they can measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_lab.bench import all_reduce, construct, memory, observe, recording_cost, step


def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench step` times every cell that was asked for, both classes in turns, and prints what it writes."""
    path = tmp_path / "step.json"
    asked = "--workloads conv_net --modes plain static_graph --sets 1 --builds 2 --seconds 0.2"
    assert step.main([*asked.split(), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    asked_for = [("conv_net", mode) for mode in ("plain", "static_graph")]
    assert [(cell["workload"], cell["mode"]) for cell in found["cells"]] == asked_for
    table = capsys.readouterr().out
    for cell in found["cells"]:
        assert len(cell["sets"]) == 1
        for builds in cell["sets"]:
            assert len(builds) == 2
            for build in builds:
                turns = {who: len(times) for who, times in build.items()}
                assert set(turns) == {"torch", "ours", "torch again"}
                assert len(set(turns.values())) == 1
                assert min(min(times) for times in build.values()) > 0
        assert cell["ours / torch"] <= cell["ours / torch upper"]
        assert f"{cell['ours / torch']:.3f}" in table


def test_recording() -> None:
    """`bench step --recording` counts the events of a step: a few for each gradient, none of them free."""
    found = recording_cost.measure(["conv_net"], rounds=1)
    assert 10 < found["conv_net"]["events"] < 100
    assert found["conv_net"]["ns"] > 0
    assert "conv_net" in recording_cost.table(found)


@pytest.mark.soak
def test_observe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench observe` times one model in turns, observed, not, and not again, and prints what it writes."""
    path = tmp_path / "observe.json"
    asked = "--workloads conv_net --modes plain static_graph --sets 1 --builds 2 --seconds 0.2"
    assert observe.main([*asked.split(), "--json", str(path)]) == 0
    table = capsys.readouterr().out
    found = json.loads(path.read_text())["cells"]
    assert [cell["mode"] for cell in found] == ["plain", "static_graph"]
    for cell in found:
        for build in cell["sets"][0]:
            assert len({len(times) for times in build.values()}) == 1
            assert min(min(times) for times in build.values()) > 0
        assert f"{cell['ours / torch']:.3f}" in table


def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench memory` sees what is surely there: buckets and gradients (2) without views, one of both with views."""
    path = tmp_path / "memory.json"
    assert memory.main(["--layers", "6", "--width", "128", "--json", str(path)]) == 0
    cases = json.loads(path.read_text())["cases"]
    for who in ("torch", "ours"):
        assert 2.0 <= cases["plain, zeros"][who]["idle"] < 2.1
        assert 1.0 <= cases["views, zeros"][who]["idle"] < 1.1
        assert cases["plain, set to None"][who]["peak"] >= 2.0
        assert 1.0 <= cases["views, set to None"][who]["peak"] < 1.5
    assert "views, set to None" in capsys.readouterr().out


@pytest.mark.soak
def test_construct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench construct` times both constructors in turns, in every set of processes."""
    path = tmp_path / "construct.json"
    assert construct.main(["--workloads", "conv_net", "--sets", "1", "--rounds", "3", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["workloads"]["conv_net"]
    assert [len(build["ours"]) for builds in found["sets"] for build in builds] == [3]
    assert found["ms"]["ours"] > 0
    assert "conv_net" in capsys.readouterr().out


def test_all_reduce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench all-reduce` times both backends and the copy, for each size."""
    path = tmp_path / "all_reduce.json"
    assert all_reduce.main(["--bytes", "4", "65536", "--rounds", "1", "--sets", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["2"]
    assert list(found) == ["4", "65536"]
    assert all(side["median_us"] > 0 for sides in found.values() for side in sides.values())
    assert {"shm", "gloo", "copy"} == set(found["4"])
    assert "65536" in capsys.readouterr().out
