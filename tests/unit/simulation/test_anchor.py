"""The anchor: what is recorded is predicted as it was, and changes are told from there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_lab.simulation.calibration import anchored, as_recorded
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.simulation.simulator import Configuration, simulate
from ddp_lab.simulation.workload import Workload

MS, MIB = 1e6, 1 << 20
LINK = CommModel(0, 15 * MS / MIB)


def _recorded(step_ms: float) -> Workload:
    made = Workload.made_up([MIB] * 4, forward_ns=20 * MS, backward_ns=40 * MS, other_ns=5 * MS)
    return replace(made, world_size=2, caps=(MIB,), step_ns=step_ms * MS)


@pytest.mark.parametrize("step_ms", [66.0, 80.0, 95.0, 110.0])
def test_what_was_recorded_is_predicted(step_ms: float) -> None:
    """The recorded configuration takes what it took, in parts that add up."""
    workload, link = anchored(_recorded(step_ms), LINK)
    found = simulate(workload, Configuration(1.0), link)
    assert found.step_ns == pytest.approx(step_ms * MS)
    parts = found.forward_ns + found.compute_ns + found.exposed_ns + found.other_ns
    assert parts == pytest.approx(found.step_ns)
    assert found.exposed_ns >= 0


def test_steps_that_took_longer_make_all_longer() -> None:
    """What the replay does not explain is added to every prediction; the link stays. The anchor is found from the
    recording, not from an anchor before. One step in four waits for gradients once."""
    bare, (made, link) = _recorded(110), anchored(_recorded(110), LINK)
    assert link is LINK
    other = Configuration(4.0)
    assert simulate(made, other, LINK).step_ns - simulate(bare, other, LINK).step_ns == pytest.approx(15 * MS)
    assert anchored(made, link)[0].waits_ns == pytest.approx(made.waits_ns)
    assert made.waits_ns == pytest.approx(15 * MS)
    often, seldom = (simulate(made, Configuration(1.0, sync_every=every), LINK) for every in (1, 4))
    assert seldom.exposed_ns == pytest.approx(often.exposed_ns / 4)


def test_steps_that_were_shorter_had_a_faster_link() -> None:
    """Where the simulation is slower than the steps were the link is made faster."""
    made, link = anchored(_recorded(80), LINK)
    assert link.ns_per_byte < 0.9 * LINK.ns_per_byte
    assert abs(made.waits_ns) < 2 * MS


@pytest.mark.parametrize("step_ms", [30, 64])
def test_a_link_that_is_not_to_blame_stays(step_ms: float) -> None:
    """Where the computation alone (65 ms) takes longer than the steps did, communication costs what was measured."""
    made, link = anchored(_recorded(step_ms), LINK)
    assert link is LINK
    two, many = (simulate(made, Configuration(1.0, world_size=n), link) for n in (2, 64))
    assert two.step_ns == pytest.approx(step_ms * MS)
    assert many.step_ns > two.step_ns
    assert many.exposed_ns > two.exposed_ns


def test_what_is_not_known_is_not_corrected() -> None:
    """Where caps or steps are unknown the workload stays as it is."""
    made_up = replace(_recorded(110), caps=())
    assert as_recorded(made_up) is None
    assert anchored(made_up, LINK)[0] is made_up
    unknown = replace(_recorded(110), step_ns=None)
    assert anchored(unknown, LINK)[0] is unknown
