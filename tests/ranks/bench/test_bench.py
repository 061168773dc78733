"""The commands `ddp-lab bench …`, and benchmarks for developers, on as little as they can measure."""

from __future__ import annotations

import json
from pathlib import Path

import paper
import pytest

from ddp_lab.bench import all_reduce, step
from ddp_lab.bench.measuring import recording_cost
from ddp_lab.bench.measuring.collectives import OPERATIONS, lacks
from tests.benchmarks.__main__ import run


@pytest.mark.soak
def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench step` times every cell that was asked for, both classes in turns, and prints what it writes."""
    path = tmp_path / "step.json"
    asked = "--models conv_net --modes static_graph --sets 1 --builds 2 --seconds 0.1 --keep-noise"
    assert step.main([*asked.split(), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    rows = [(cell["workload"], cell["mode"], cell["backend"]) for cell in found["cells"]]
    assert rows == [("conv_net", "static_graph", backend) for backend in ("gloo", "shm")]
    table = capsys.readouterr().out
    for cell in found["cells"]:
        turns = set()
        for sets, contestants in (
            (cell["sets"], {"torch", "ours", "torch again"}),
            (cell["floors"], {"torch", "ours", "limit"}),
        ):
            assert len(sets) == 1
            for builds in sets:
                assert len(builds) == 2
                for build in builds:
                    assert set(build) == contestants
                    assert min(min(times) for times in build.values()) > 0
                turns.add(tuple(len(times) for build in builds for times in build.values())[:2])
        assert len(turns) == 1  # all sides of all backends took turns together
        assert cell["ours / torch"] <= cell["ours / torch upper"]
        assert f"{cell['ours / torch']:.3f}" in table
        for who in ("ours", "limit"):
            assert f"{cell['classes'][who]['exposed']['median']:.2f}" in table
    assert [(one["ours on"], one["torch on"]) for one in found["exposed"]] == [("gloo", "gloo"), ("shm", "gloo")]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("figure", "variants"),
    [(6, 6), (7, 14), (9, 4), (10, 8), (12, 3)],
)
def test_paper(figure: int, variants: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m paper` times every variant of a figure in turns, against the one that it names."""
    path = tmp_path / "paper.json"
    asked = f"--figure {figure} --models conv_net --sets 1 --seconds 0.02 --mbit 0 --keep-noise --ranks 2"
    assert paper.main([*asked.split(), "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == variants
    table = capsys.readouterr().out
    for row in rows:
        assert row["ms"]["median"] > 0
        assert len(row["steps"]) >= 3
        assert row["variant"] in table
        if row["variant"] == row["reference"]:
            assert row["ratio"]["median"] == 1
        assert (row["parts"]["communication"] > 0) == (not row["overlap"])
        assert min(row["parts"][part] for part in ("forward", "backward", "optimizer")) > 0
    assert f"figure {figure}, " in table


@pytest.mark.soak
def test_paper_communication(tmp_path: Path) -> None:
    """Figure 2: every size of a call on every backend, and all parameters of the model are used and become ready."""
    path = tmp_path / "paper.json"
    asked = "--figure 2 --models conv_net --sets 1 --seconds 0.02 --parameters 20000 --keep-noise"
    assert paper.main([*asked.split(), "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    sizes = [(row["backend"], row["size"]) for row in rows if "size" in row]
    assert sizes == [(backend, size) for backend in ("gloo", "shm") for size in (1000, 10_000, 20_000)]
    assert all(row["seconds"]["median"] > 0 for row in rows if "size" in row)
    [ready] = [row for row in rows if "backward" in row]
    assert ready["parameters"][-1] == ready["used"][-1] > 100_000
    assert ready["backward"] == sorted(ready["backward"])
    assert ready["forward"] == sorted(ready["forward"])


@pytest.mark.soak
def test_recording() -> None:
    """`bench step --recording` counts the events of a step: a few for each gradient, none of them free."""
    found = recording_cost.measure(["conv_net"], rounds=1)
    assert 10 < found["conv_net"]["events"] < 100
    assert found["conv_net"]["ns"] > 0
    assert "conv_net" in recording_cost.table(found)


@pytest.mark.soak
def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`memory` sees what is surely there: buckets and gradients (2) without views, one of both with views."""
    path = tmp_path / "memory.json"
    assert run("memory", ["--layers", "6", "--width", "128", "--json", str(path)]) == 0
    cases = json.loads(path.read_text())["cases"]
    for who in ("torch", "ours"):
        assert 2.0 <= cases["plain, zeros"][who]["idle"] < 2.1
        assert 1.0 <= cases["views, zeros"][who]["idle"] < 1.1
        assert cases["plain, set to None"][who]["peak"] >= 2.0
        assert 1.0 <= cases["views, set to None"][who]["peak"] < 1.5
    assert "views, set to None" in capsys.readouterr().out


@pytest.mark.soak
def test_all_reduce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench all-reduce` times each collective on both backends beside both limits, shm in its own memory, too."""
    path = tmp_path / "all_reduce.json"
    asked = "--operation all --ranks 2 --bytes 4 4096 --rounds 1 --sets 1 --keep-noise"
    assert all_reduce.main([*asked.split(), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    sizes = [(name, size) for name in OPERATIONS for size in ((0,) if name == "barrier" else (4, 4096))]
    assert [(row["operation"], row["bytes"]) for row in found["rows"]] == sizes
    for row in found["rows"]:
        limits = set() if row["operation"] == "barrier" else {"copy", "triad"}
        shared = {"shm shared"} if row["operation"] == "all_reduce" else set()
        assert set(row["sides"]) | set(row["missing"]) == {"shm", "gloo"} | shared | limits
        assert "shm" in row["sides"]
        assert all(side["median"] > 0 for side in row["sides"].values())
    assert "all_gather_into_tensor" in capsys.readouterr().out


def test_all_reduce_names_what_is_no_backend(capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that can't be used is an error that lists those that can."""
    with pytest.raises(SystemExit):
        all_reduce.main(["--backends", "shm", "glue"])
    told = capsys.readouterr().err
    assert "invalid choice: 'glue'" in told
    assert "shm" in told


def test_what_a_backend_lacks() -> None:
    """Torch's refusal of an operation that a backend lacks is told; any other error is raised."""

    def refuses(words: str) -> None:
        raise RuntimeError(words)

    assert lacks(lambda: None) == ""
    assert lacks(lambda: refuses("Backend gloo does not support reduce_scatter")).endswith("reduce_scatter")
    with pytest.raises(RuntimeError, match="closed"):
        lacks(lambda: refuses("Connection closed by peer"))


# The benchmarks for developers that open no browser -> as little as they can measure.
SMALL = {
    "observe": "--workloads conv_net --modes plain --sets 1 --builds 2 --seconds 0.2",
    "construct": "--workloads conv_net --sets 1 --rounds 3",
    "predicted-memory": "--models conv_net --ranks 2",
    "what-if": "--models small_tensors conv_net --ranks 2 --caps 0.1 1 --fit 0.5 --rounds 1 --steps 5",
    "tune": "--model conv_net --caps 0.5 4 --rounds 1 --steps 3 --seconds 20",
    "events": "--ranks 2 --rounds 1 --models conv_net",
    "push": "--ranks 2 --megabytes 20 --rounds 3",
    "stragglers": "--delayed 2 --clean 2",
}


@pytest.mark.soak
@pytest.mark.parametrize("name", SMALL)
def test_benchmarks_for_developers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each measures, writes what it found, and prints it as a table."""
    path = tmp_path / "found.json"
    assert run(name, [*SMALL[name].split(), "--json", str(path)]) == 0
    assert json.loads(path.read_text())
    assert len(capsys.readouterr().out.splitlines()) > 1
