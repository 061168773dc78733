"""The verdict on a checked hook, and the gradient noise scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ddp_lab.analysis.check_reports import BucketCheck, HookProblem, HookReport, TrainingCheck
from ddp_lab.parallel.hook_check.cases import Case
from ddp_lab.timeline.tables.gradients import noise_scale, signal_and_noise


def report(*problems: HookProblem) -> HookReport:
    """A report with one bucket and a training."""
    bucket = BucketCheck(
        "float32, 10 elements", "float32", 10, 40, 1, 1e-7, 2e-7, math.nan, True, 20.0, 20.0, {"allreduce": 1.0}, 0.1,
        2.0, 0.01, 0.0,
    )  # fmt: skip
    training = TrainingCheck("Net", (2.0, 1.0), (2.0, math.nan), 3.0, 4.0, 100.0, 200.0, True)
    return HookReport("my<hook>", 2, "gloo", (bucket,), training, problems, ("A note.",))


def test_a_warning_is_ok_and_an_error_is_not() -> None:
    """`ok` says whether there is an error; the verdict counts both. A bucket is called what it is."""
    mild, bad = HookProblem("mild", "It is odd.", "Look.", "warning"), HookProblem("bad", "It is wrong.", "Fix it.")
    assert report().ok
    assert "ok" in report().verdict
    assert "<ul>" not in report()._repr_html_(), "a page without problems has no list of them"
    assert report(mild).ok
    assert not report(bad, mild).ok
    assert "1 error and 1 warning" in report(bad, mild).verdict
    assert Case(torch.float32, ((1,),)).name == "float32, 1 element"
    assert Case(torch.float32, ((7,), (3, 5))).name == "float32, 22 elements"


def test_the_noise_scale() -> None:
    """Norms of random gradients around a known one give its norm and the noise back, for any number of ranks. One rank,
    no step, or no signal: NaN, not an error; ranks without gradients do not count."""
    generator = np.random.default_rng(0)
    true = generator.normal(size=300)
    for ranks in (2, 5):
        found = true + 3 * generator.normal(size=(4000, ranks, 300))
        before = np.linalg.norm(found, axis=2)
        after = np.linalg.norm(found.mean(axis=1), axis=1)
        signal, noise = signal_and_noise(before, after)
        assert signal.mean() == pytest.approx(true @ true, rel=0.1)
        assert noise.mean() == pytest.approx(9 * 300, rel=0.02)
        assert noise_scale(signal, noise) == pytest.approx(2700 / (true @ true), rel=0.12)
    assert np.isnan(signal_and_noise(np.array([[1.0]]), np.array([1.0]))[0]).all()
    assert math.isnan(noise_scale(np.empty(0), np.empty(0)))
    assert math.isnan(noise_scale(np.array([-1.0]), np.array([1.0])))
    with_idle = signal_and_noise(np.array([[1.0, 2.0, np.nan]]), np.array([1.2]))
    assert with_idle == signal_and_noise(np.array([[1.0, 2.0]]), np.array([1.2]))
