"""Collectives and gradients in Chromium, on a real cluster: what a reader runs, plays, switches on and reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator

from ddp_lab import Cluster, ClusterError
from ddp_lab.output.board import SilentBoard
from tests.browser.bare_page import BarePage, bare_page
from tests.waiting import wait_until

RANKS = 3


class Shown(BarePage):
    """A page with the collectives of a cluster."""

    cluster: Cluster

    def run(self, collective: str, algorithm: str) -> None:
        """Chooses and runs one, as a reader does: each choice runs, and the last result is drawn."""
        self.pump()  # a page that hears nothing for seconds offers nothing
        self.page.get_by_label("collective", exact=True).select_option(collective)
        self.pump()
        self.page.get_by_label("algorithm", exact=True).select_option(algorithm)
        self.pump()
        self.until(lambda: self.dashboard.facts["collectives"]["state"] == "idle", "the end of the last run")
        drawn, last = self.page.locator(".ddp-collectives"), str(self.dashboard.facts["collectives"]["number"])
        self.until(lambda: drawn.get_attribute("data-number") == last, "its picture")
        self.until(lambda: f"{collective} by {algorithm} over" in self.sentence(), "its sentence")

    def sentence(self) -> str:
        return self.page.locator(".ddp-collectives .ddp-sentence").first.inner_text()

    def now(self) -> str:
        return self.page.locator(".ddp-now").inner_text()

    def fills(self, rank: int, part: int) -> int:
        """How many contributions a cell shows."""
        return self.page.locator(f".ddp-stage [data-rank='{rank}'][data-part='{part}'] rect[fill]").count()

    @property
    def stage(self) -> Locator:
        return self.page.locator(".ddp-stage")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three ranks for all tests here."""
    with Cluster(RANKS) as started:
        yield started


@pytest.fixture(scope="module")
def shown(browser: Browser, cluster: Cluster) -> Iterator[Shown]:
    """The collectives of the cluster, in a page 600 pixels wide."""
    means = cluster.dashboard_means()
    with bare_page(
        browser, cluster.timeline, width=600, height=800, kind=Shown, views=["collectives"], **means
    ) as made:
        made.cluster = cluster
        made.pump()
        yield made


def test_it_says_what_to_do_before_the_first(shown: Shown) -> None:
    """Empty, it names the button; algorithms that three ranks can't run are there, but can't be chosen."""
    assert "No collective has been run yet" in shown.sentence()
    assert not shown.stage.is_visible()
    halving = shown.page.locator("option[value=halving]")
    assert halving.is_disabled()
    assert "2, 4, 8" in halving.inner_text()


def test_a_ring_is_run_and_played(shown: Shown) -> None:
    """Run on the ranks, stepped by keyboard and played to its end: cells fill, bytes add up, blocks move; at 600
    pixels nothing is cut off."""
    shown.page.get_by_role("button", name="Run on the ranks").click()
    shown.until(lambda: "all_reduce by ring over 3 ranks, 64 KiB on each: 4 steps" in shown.sentence(), "a run")
    assert "1.33 × buffer" in shown.sentence()
    assert [[shown.fills(rank, part) for part in range(3)] for rank in range(3)] == [[1] * 3] * 3
    shown.stage.focus()
    shown.page.keyboard.press("ArrowRight")
    shown.until(lambda: shown.page.locator(".ddp-block").count() == RANKS, "blocks on their way")
    shown.until(lambda: shown.now().startswith("Step 1 of 4: 3 ranks send at once, 21.3 KiB"), "the first step")
    shown.until(lambda: shown.page.locator(".ddp-arrow").count() == RANKS, "its arrows")
    filled = [[shown.fills(rank, part) for part in range(3)] for rank in range(3)]
    assert filled == [[2 if part == (rank + 1) % 3 else 1 for part in range(3)] for rank in range(3)]
    shown.page.get_by_label("speed", exact=True).select_option("4")
    shown.page.get_by_role("button", name="Play").click()
    shown.until(lambda: shown.page.locator(".ddp-whole").count() == 9, "all parts whole on all ranks")
    assert shown.now().startswith("Step 4 of 4")
    shown.stage.focus()
    shown.page.keyboard.press("ArrowDown")
    shown.says(".ddp-voice", "rank 0 after 4 steps, has sent 85.3 KiB, holds part 0 of 0+1+2")
    assert shown.page.evaluate("() => document.documentElement.scrollWidth") <= 600


def test_the_table_says_the_same(shown: Shown) -> None:
    """The twin has who holds what after each step; a click on a step's time shows that step."""
    shown.run("all_gather", "ring")
    shown.page.locator(".ddp-collectives summary").click()
    body = shown.page.locator(".ddp-collectives tbody tr")
    shown.until(lambda: body.count() == 3 * RANKS, "who holds what")
    rows = body.all_inner_texts()
    assert rows[1].split("\t") == ["start", "1", "–", "–", "part 1 of 1"]
    assert rows[-1].split("\t")[-1] == "part 0 of 0; part 1 of 1; part 2 of 2"
    shown.page.locator(".ddp-collectives summary").click()
    shown.page.locator("[data-step='2']").click()
    shown.until(lambda: shown.page.locator(".ddp-whole").count() == 9, "the last step")


def test_without_motion_steps_are_jumps(shown: Shown) -> None:
    """For readers who prefer reduced motion nothing flies: each step is shown at once, with arrows."""
    shown.run("broadcast", "tree")
    shown.page.emulate_media(reduced_motion="reduce")
    shown.stage.focus()
    shown.page.keyboard.press("ArrowRight")
    assert shown.page.locator(".ddp-block").count() == 0
    assert shown.page.locator(".ddp-arrow").count() == RANKS
    assert shown.now().startswith("Step 1 of 2: rank 0 sends 64 KiB to rank 2")
    shown.page.emulate_media(reduced_motion="no-preference")


def test_one_sender_is_named(shown: Shown) -> None:
    """Where one rank sends to several, a step's sentence says so; the others get their own part alone."""
    shown.run("scatter", "direct")
    shown.stage.focus()
    shown.page.keyboard.press("End")
    shown.until(lambda: shown.now().startswith("Step 1 of 1: rank 0 sends 42.7 KiB to 2 ranks"), "the only step")
    assert [shown.fills(rank, rank) for rank in range(RANKS)] == [1] * RANKS
    assert shown.fills(1, 2) == 0


def test_parts_change_their_places(shown: Shown) -> None:
    """In all_to_all the arrow of each part ends in another row, at the number of the rank that it came from."""
    shown.run("all_to_all", "direct")
    shown.stage.focus()
    shown.page.keyboard.press("End")
    shown.until(lambda: shown.now().startswith("Step 1 of 1: 3 ranks send at once, 42.7 KiB each"), "the only step")
    slanted = "paths => paths.map(one => [0, one.getTotalLength()].map(at => Math.round(one.getPointAtLength(at).y)))"
    ends: Any = shown.page.locator(".ddp-arrow").evaluate_all(slanted)
    assert len(ends) == RANKS * (RANKS - 1)
    assert all(begin != end for begin, end in ends)
    shown.page.keyboard.press("ArrowDown")
    shown.says(".ddp-voice", "after 1 step, has sent 42.7 KiB, holds part 0 of 0; part 1 of 1; part 2 of 2")


def test_the_facade_shows_or_refuses(shown: Shown) -> None:
    """`animate_collective` returns the widget with records and pictures; what can't be is refused before it runs."""
    view = shown.cluster.animate_collective("reduce_scatter", bytes=1000)
    try:
        assert view.shown.bytes == 1008
        assert view.shown.steps[-1].holds[1][1] == (0, 1, 2)
        assert " data-" not in view.svg()
        assert "reduce_scatter by ring over 3 ranks" in view.svg()
        assert len(view.figure().data) == 1 + RANKS
    finally:
        view.close()
        view.layout.close()
    with pytest.raises(ValueError, match="no algorithm 'butterfly'"):
        shown.cluster.animate_collective("all_reduce", "butterfly")
    with pytest.raises(ValueError, match="power of two"):
        shown.cluster.animate_collective("all_reduce", "halving")
    running = shown.cluster.run("import time; time.sleep(600)", wait=False)
    with pytest.raises(ClusterError, match=r"ranks 0, 1, 2 are running a cell"):
        shown.cluster.animate_collective()
    shown.cluster.interrupt()
    with pytest.raises(Exception, match="interrupted"):
        running.wait()


TRAINING = """
import pathlib
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
model = ddp_lab.DistributedDataParallel(net, bucket_cap_mb=0.0005)
torch.manual_seed(rank)
poison = torch.tensor(0.0)
net[1].weight.register_hook(lambda gradient: gradient + poison)
def step():
    model.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    go = torch.tensor([0 if pathlib.Path({path!r}).exists() else 1])
    dist.broadcast(go, 0)
    return bool(go)
step()
"""
QUIET = "import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n    step(); step()"


@pytest.fixture(scope="module")
def gradients(browser: Browser, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BarePage]:
    """The gradients of a model that trains until the page has seen watched steps, switched on there."""
    end = tmp_path_factory.mktemp("gradients") / "end"
    means = cluster.dashboard_means()
    with bare_page(browser, cluster.timeline, width=600, views=["gradients"], **means) as made:
        made.says(".ddp-gradients", "No model yet")
        cluster.run(TRAINING.replace("{path!r}", repr(str(end))), board=SilentBoard())
        made.says(".ddp-gradients", "No step has been monitored")
        running = cluster.run("while step(): pass", wait=False, board=SilentBoard())
        made.page.get_by_label("monitor gradients every N steps").fill("2")
        made.page.get_by_role("button", name="Monitor").click()
        summary = made.page.locator(".ddp-gradients .ddp-summary").first
        made.until(lambda: "monitored steps" in summary.inner_text(), "monitored steps")
        made.page.get_by_role("button", name="Check now").click()
        made.until(lambda: made.page.locator(".ddp-numbers tbody tr").count() == 1, "a comparison")
        end.touch()
        running.wait()
        yield made


def test_watching_is_switched_on_while_a_cell_trains(gradients: BarePage, cluster: Cluster) -> None:
    """From the page, under way: steps are watched on all ranks, replicas compared, and the view says what it costs."""
    reducer = cluster.timeline.reducers()[-1].reducer

    def of_all_ranks() -> bool:  # what a rank says of the newest step may be on its way
        return all(len(one["before"]) == RANKS for one in cluster.timeline.watched_gradients(reducer))

    wait_until(of_all_ranks, "steps are watched on all ranks")
    gradients.says(".ddp-gradients", "Gradients of every 2nd step are monitored.")
    text = gradients.page.locator(".ddp-gradients").inner_text()
    assert "0.13 ms per MiB" in text
    assert "Noise scale" in text
    assert "equal" in gradients.page.locator(".ddp-numbers tbody tr").inner_text()
    assert gradients.page.locator(".ddp-gradients canvas").count() == 2


def test_the_numbers_are_the_timelines(gradients: BarePage, cluster: Cluster) -> None:
    """The twin has the norms of `Timeline.gradients`; a step is chosen by keyboard and told in words,
    and its buckets are shown."""
    page = gradients.page
    table = cluster.timeline.gradients(cluster.timeline.reducers()[-1].reducer)
    newest = f"the newest {table.step.max()};"  # else the keys reach a picture that changes
    gradients.until(lambda: newest in page.locator(".ddp-gradients .ddp-summary").first.inner_text(), newest)
    page.locator(".ddp-gradients summary").click()
    cells = gradients.first_row(".ddp-twin")
    page.locator(".ddp-gradients summary").click()
    wanted = table[(table.bucket == -1) & (table.step == int(cells[0]))].iloc[0]
    for text, name in zip(cells[1:5], ("before_min", "before_mean", "before_max", "after"), strict=True):
        assert float(text) == pytest.approx(wanted[name], rel=0.02)
    page.locator(".ddp-gradients .ddp-chart").first.focus()
    page.keyboard.press("Home")
    said = gradients.says(".ddp-voice", f"rank {RANKS - 1}, before")
    assert "average" in said
    first = said.partition(",")[0]
    page.keyboard.press("Enter")
    heading = gradients.page.locator(".ddp-gradients .ddp-summary").nth(1)
    gradients.until(lambda: heading.inner_text().lower().startswith(f"{first}, by bucket"), "the buckets of that step")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 600


def test_nan_and_drift_are_named(gradients: BarePage, cluster: Cluster) -> None:
    """A NaN is flagged with parameter and rank, a replica that differs with the ranks that hold the same."""
    cluster.run(f"poison = torch.tensor(float('nan') if rank == 1 else 0.0)\n{QUIET}", board=SilentBoard())
    notice = gradients.page.locator(".ddp-gradients .ddp-notice")
    gradients.until(
        lambda: notice.is_visible() and "first in the gradient of 1.weight on rank 1" in notice.inner_text(), "the NaN"
    )
    cluster.run("if rank == 2: net[0].bias.data[0] = 9.0", board=SilentBoard())
    gradients.page.get_by_role("button", name="Check now").click()
    gradients.until(lambda: "ranks 0, 1 | rank 2" in notice.inner_text(), "the drift")
    gradients.says(".ddp-numbers", "differ: 0.bias")


def test_a_stopped_cluster_is_named(shown: Shown) -> None:
    """Where there are no ranks any more the view says so, and keeps the last picture."""
    shown.run("reduce_scatter", "ring")
    shown.cluster.stop()
    shown.page.get_by_role("button", name="Run on the ranks").click()
    notice = shown.page.locator(".ddp-collectives .ddp-notice")
    shown.until(lambda: notice.is_visible() and "the cluster is not running" in notice.inner_text(), "the notice")
    assert shown.stage.is_visible()
