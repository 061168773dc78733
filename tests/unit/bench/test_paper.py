"""The paper's figures: what is made of measured steps, what is simulated, and how it is told and drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import paper
import pytest
from paper import figures, hardware, settings

SETTINGS = paper.Settings()
STEPS = list(settings.SERIES)


def made_up(figure: int, ranks: int = 4) -> dict[str, Any]:
    """A raw result: a forward of 10 ms, a backward of 20, communication of 12 of which overlap hides 8, optimizer 2."""
    found: dict[str, Any] = {}
    for model in SETTINGS.models:
        found[model] = {}
        for series in settings.series(figure, SETTINGS, ranks):
            for name, variant in series.variants.items():
                exposed = 4.0 if variant.overlap and not variant.alone else 0.0
                parts = {"forward": 10.0, "backward": 20.0 + exposed, "communication": 0.0, "optimizer": 2.0}
                parts["communication"] = 0.0 if variant.overlap else 12.0
                step = sum(parts.values())
                found[model][name] = {"turns": [step] * 3, "steps": [step] * 2 + [3 * step], "parts": parts}
    return found


def communication() -> dict[str, Any]:
    """A raw result of figure 2."""
    ready = {"parameters": [5.0, 10.0], "backward": [1.0, 2.0], "used": [5.0, 10.0], "forward": [0.5, 1.0]}
    seconds = {backend: {"1000": [3.0, 4.0, 9.0], "60000000": [1.0]} for backend in ("gloo", "shm")}
    return {"seconds": seconds, "ready": {"resnet": ready}}


def curves(harm: float = 1.0) -> list[dict[str, Any]]:
    """A raw result of figure 11."""
    about = {"data": "digits", "batch": 8, "lr": 0.02}
    return [
        about
        | {"every": every, "losses": [harm * every / (1 + n) for n in range(40)], "held_out": harm, "accuracy": 0.9}
        for every in (1, 2, 4, 8)
    ]


RAW = {2: communication(), 11: curves(), **{figure: made_up(figure) for figure in STEPS}}


def test_breakdown() -> None:
    """Figure 6: with overlap, what the backward takes longer than one alone is exposed communication; the gain is a
    part of the step without overlap."""
    found = paper.result(6, [RAW[6]] * 3, ranks=4)
    by = {(row["model"], row["backend"], row["overlap"]): row for row in found["breakdown"]}
    assert len(by) == len(SETTINGS.models) * len(SETTINGS.backends) * 2
    for model in SETTINGS.models:
        without, overlapped = by[model, "gloo", False], by[model, "gloo", True]
        assert without["parts"] == {"forward": 10, "backward": 20, "communication": 12, "optimizer": 2}
        assert overlapped["parts"] == {"forward": 10, "backward": 20, "communication": 4, "optimizer": 2}
        assert without["gain"]["median"] == 0
        assert overlapped["gain"]["median"] == pytest.approx(100 * 8 / 44)


def test_worlds_divide_the_ranks() -> None:
    """Figure 9 measures the worlds into which the ranks at hand can be divided evenly."""
    worlds = {
        ranks: {variant.world for series in settings.series(9, SETTINGS, ranks) for variant in series.variants.values()}
        for ranks in (1, 2, 3, 4, 6)
    }
    assert worlds == {1: {1}, 2: {1, 2}, 3: {1}, 4: {1, 2, 4}, 6: {1, 2}}


@pytest.mark.parametrize(("model", "backend"), hardware.GAINS)
def test_simulated_parts_add_up(model: str, backend: str) -> None:
    """Figure 6: the step without overlap is 100 %, and overlap changes nothing but what is exposed."""
    without, overlapped = (
        row["parts"] for row in hardware.simulated(6) if (row["model"], row["backend"]) == (model, backend)
    )
    assert sum(without.values()) == pytest.approx(100)
    assert overlapped["communication"] < without["communication"]
    assert {**overlapped, "communication": 0} == pytest.approx({**without, "communication": 0})


def test_simulated_outliers_and_groups() -> None:
    """Figures 7 and 8: no step is faster than without outliers, and with twice as many GPUs there are more of them.
    Figure 12: more groups are never slower in the simulation, and the bound with more bandwidth is the lower one."""
    outliers = []
    for ranks in (16, 32):
        steps = np.array(hardware.steps_of(100.0, ranks, np.random.default_rng(0)))
        assert steps.min() == 100
        outliers.append((steps > 101).mean())
    assert 1.4 * outliers[0] < outliers[1] < 0.5
    rows = {
        (row["model"], row["backend"], row["groups"], row["shared"]): row["ratio"] for row in hardware.simulated(12)
    }
    for (model, backend, groups, shared), ratio in rows.items():
        assert ratio <= 1 + 1e-9
        if not shared:
            assert ratio <= rows[model, backend, groups, True] + 1e-9


def test_median_of_seeds() -> None:
    """Figure 11: curves are medians over the seeds, and the range of what is held out is told."""
    found = paper.result(11, [curves(1.0), curves(2.0), curves(5.0)])
    assert found["rows"][0]["losses"][0] == 2.0
    assert found["rows"][0]["held_out"] == 2.0
    assert found["rows"][0]["held_out_range"] == [1.0, 5.0]
    assert "(1.000 .. 5.000)" in paper.table(found)


@pytest.mark.parametrize("number", paper.FIGURES)
def test_each_figure_marks_what_it_shows(number: int) -> None:
    """The legend tells measured, simulated and published values apart; each published one says where it is from."""
    found = paper.result(number, [RAW[number]] * 3, ranks=4)
    made = paper.picture(found)
    titles = [one.text for one in made.layout.annotations]
    names = [trace.name for trace in made.data if trace.showlegend]
    assert len(set(names)) == len(names)
    assert any(title.startswith("measured here") for title in titles)
    assert any(title.startswith("simulated") for title in titles) == bool(found["simulated"])
    points = figures.of_figure(number)
    assert bool(points) == any(name.startswith("published") for name in names)
    for point in points:
        assert "2006.15704" in point.source
        assert point.approximate == ("approximate" in point.source)
        assert point.source in paper.table(found)
    stars = [trace for trace in made.data if trace.hovertext]
    assert all("2006.15704" in star.hovertext for star in stars)


def test_what_is_noisy_is_left_out() -> None:
    """A figure that other programs disturbed is neither told nor drawn, unless it is to be kept."""
    found = paper.result(6, [RAW[6]] * 3, ranks=4, others=[0.5] * 3)
    measured = [trace for trace in paper.picture(found).data if trace.name == "forward"]
    assert all(len(trace.y) == 0 for trace in measured)
    assert "too noisy" in paper.table(found)
    kept = [trace for trace in paper.picture(found, keep=True).data if trace.name == "forward"]
    assert all(len(trace.y) == 4 for trace in kept)
    assert "too noisy" not in paper.table(found, keep=True)


def test_only_the_gains_are_exact() -> None:
    """The paper's overlap gains are the only numbers that are not marked as approximate."""
    exact = {(point.model, point.backend): point.values for point in figures.POINTS if not point.approximate}
    assert exact == {
        ("ResNet50", "nccl"): (38.0,),
        ("BERT", "nccl"): (35.2,),
        ("ResNet50", "gloo"): (26.8,),
        ("BERT", "gloo"): (21.5,),
    }
