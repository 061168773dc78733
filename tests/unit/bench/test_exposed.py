"""Exposed communication from times with and without it, and the pictures of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_lab.bench import pictures
from ddp_lab.bench.measuring import drawing, noise, ratios
from tests import made_up_benchmarks as made_up


def test_exposed_is_what_is_above_the_floor() -> None:
    """The difference is taken turn by turn: a machine that slows down for a while does not change it."""
    sets = [[{"torch": [30.0, 60.0, 31.0], "ours": [22.0, 44.0, 23.0]}] for _ in range(5)]
    floors = [[{"torch": [20.0, 50.0, 21.0], "ours": [20.0, 42.0, 21.0]}] for _ in range(5)]
    found = ratios.exposed({"gloo": (sets, floors)}, made_up.JUDGE)["gloo"]
    assert found["torch"]["exposed"]["median"] == pytest.approx(10)
    assert found["ours"]["exposed"]["median"] == pytest.approx(2)
    assert found["torch"]["step"]["median"] == 31
    assert found["torch"]["floor"]["median"] == 21


def test_ours_on_one_backend_against_torchs_on_another() -> None:
    """2 ms instead of 10 is a fifth; a part that is too noisy makes the ratio so, and about 0 can't be divided by. What
    ranks that only meet expose, above the floor of ours and against what torch's class does."""
    ours = made_up.builds({"ours": 22.0}), made_up.builds({"ours": 20.0})
    torchs = made_up.builds({"torch": 30.0}), made_up.builds({"torch": 20.0})
    sound, noisy = noise.figure([1.0] * 3), noise.figure([1.0, 2.0, 3.0])
    found = ratios.exposed_left(ours, torchs, (sound, sound))
    assert (found["ratio"], found["upper"]) == (pytest.approx(0.2), pytest.approx(0.2))
    assert not found["noisy"]
    assert ratios.exposed_left(ours, torchs, (sound, noisy))["why"] == noisy["why"] != ""
    nothing = ratios.exposed_left(ours, (torchs[1], torchs[1]), (sound, sound))
    assert nothing["ratio"] is None
    assert nothing["noisy"]
    ours = made_up.builds({"ours": 22.0}), made_up.builds({"torch": 20.0, "ours": 20.0, "limit": 21.5})
    sound = noise.figure([1.0] * 3)
    assert ratios.exposed_left(ours, torchs, (sound, sound))["limit"] == pytest.approx(0.15)
    unknown = ours[0], made_up.builds({"ours": 20.0})
    assert ratios.exposed_left(unknown, torchs, (sound, sound))["limit"] is None
    both = made_up.builds({"torch": 30.0, "ours": 22.0, "torch again": 30.0})
    found = ratios.exposed({"shm": (both, ours[1])}, made_up.JUDGE)["shm"]["limit"]
    assert found["exposed"]["median"] == pytest.approx(1.5)


def test_lines_and_bars() -> None:
    """A line for each backend, limit and number of ranks in both panels; what is too noisy leaves a gap unless kept.
    With one size there is a bar for each operation and backend, and the limits as lines."""
    result = made_up.collectives([4, 1024, 1 << 20], worlds=(2, 4))
    figure = pictures.collectives(result)
    names = [line.name for line in figure.data if line.showlegend]
    assert names == [
        f"{side}, {ranks} ranks{at_once}"
        for ranks in (2, 4)
        for side, at_once in (
            ("shm", ""),
            ("shm shared", ""),
            ("gloo", ""),
            ("copy", " at once"),
            ("triad", " at once"),
        )
    ]
    assert len(figure.data) == 2 * len(names)
    assert list(figure.layout.xaxis.ticktext) == ["4 B", "1 KiB", "1 MiB"]
    (noisy,) = (line for line in figure.data if line.name == "gloo, 4 ranks" and line.showlegend)
    assert [value is None for value in noisy.y] == [False, False, True]
    assert "1 value was too noisy: not shown" in figure.layout.title.text
    (kept,) = (
        line for line in pictures.collectives(result, keep=True).data if line.name == noisy.name and line.showlegend
    )
    assert None not in kept.y
    rates = next(line for line in figure.data if line.name == "shm, 2 ranks" and not line.showlegend)
    assert rates.y[0] == pytest.approx(4 / result["rows"][0]["sides"]["shm"]["median"] * 1e6 / 2**30)
    figure = pictures.collectives(made_up.collectives([1 << 20], ("all_reduce", "broadcast")))
    assert {one.name: one.type for one in figure.data} == {
        "shm, 2 ranks": "bar",
        "shm shared, 2 ranks": "bar",
        "gloo, 2 ranks": "bar",
        "copy, 2 ranks at once": "scatter",
        "triad, 2 ranks at once": "scatter",
    }
    assert [list(one.x) for one in figure.data[1:3]] == [["all_reduce", "broadcast"], ["all_reduce"]]
    assert "of 1 MiB" in figure.layout.title.text


def test_pictures_of_steps_and_of_nothing(tmp_path: Path) -> None:
    """For each model floor and exposed communication are stacked, by backend and class; the page needs no network.
    Where no figure can be told, the picture says so instead of showing empty axes."""
    figure = pictures.steps(made_up.step_cells(("mlp", "conv_net")))
    assert [bar.name for bar in figure.data] == ["no_sync (baseline)", "exposed communication"] * 2
    assert [list(names) for names in figure.data[0].x] == [["gloo", "gloo", "shm", "shm"], ["torch", "ours"] * 2]
    assert list(figure.data[1].y) == pytest.approx([10, 8, 3, 2])
    drawing.write(figure, tmp_path / "steps.html")
    page = (tmp_path / "steps.html").read_text(encoding="utf-8")
    assert "<title>A training step: computation and exposed communication</title>" in page
    assert "<script src=" not in page
    result = made_up.collectives([4, 1024])
    for row in result["rows"]:
        row["sides"] = {name: one | {"noisy": True, "why": "others: 50 %"} for name, one in row["sides"].items()}
    (words,) = pictures.collectives(result).layout.annotations
    assert "too noisy" in words.text
    assert pictures.collectives(result, keep=True).data
    cells = made_up.step_cells(("mlp",))
    for cell in cells["cells"]:
        cell["classes"]["torch"]["step"]["noisy"] = cell["classes"]["ours"]["step"]["noisy"] = True
    assert not pictures.steps(cells).data
