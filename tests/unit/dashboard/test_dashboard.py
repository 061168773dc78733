"""The dashboard without a browser: what it sends, keeps and leaves behind."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comm
import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances

from ddp_lab.cluster.cluster import Cluster
from ddp_lab.cluster.followed import follow
from ddp_lab.dashboard import bundle
from ddp_lab.dashboard.dashboard import Dashboard
from ddp_lab.dashboard.life import life_of
from ddp_lab.dashboard.live_widget import Refresher, receive_while_busy
from ddp_lab.dashboard.paint import palette
from ddp_lab.dashboard.scene import Spans
from ddp_lab.dashboard.step_feed import BLOCKS, StepFeed
from ddp_lab.dashboard.views.step_frames import StepFrames
from ddp_lab.dashboard.views.timeline import timeline_scene
from ddp_lab.engine.telemetry import interval_of
from ddp_lab.protocol.events import Batch, Kind
from ddp_lab.simulation.link_model import CommModel
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training
from tests.unit.backwards import rows
from tests.waiting import DEADLINE_S, wait_until

Made = Callable[..., Dashboard]


class _Recorder(Dashboard):
    """Keeps what it sends to the browser."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.sent: list[tuple[dict[str, Any], Any]] = []
        super().__init__(*args, **options)

    def send(self, content: Any, buffers: Any = None) -> None:
        self.sent.append((content, buffers))


@pytest.fixture
def make() -> Iterator[Made]:
    """Makes dashboards and closes them; no widget, comm or thread is left that was not there before."""
    widgets, comms, threads = set(_instances), set(comm.get_comm_manager().comms), set(threading.enumerate())
    made: list[Dashboard] = []

    def build(timeline: Timeline, kind: type[Dashboard] = _Recorder, **options: Any) -> Dashboard:
        made.append(kind(timeline, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()
        if one.layout is not None:
            one.layout.close()
    assert not _instances.keys() - widgets
    assert not comm.get_comm_manager().comms.keys() - comms
    assert not [thread for thread in threading.enumerate() if thread not in threads and thread.is_alive()]


def _steps_sent(dashboard: Any) -> list[int]:
    return [head["step"] for content, _ in dashboard.sent if content["type"] == "steps" for head in content["steps"]]


def test_sends_each_step_once(make: Made) -> None:
    """Steps that are in the timeline, and those that come, are sent once each, oldest first. A page that was opened
    later asks, and is sent the steps that are held."""
    timeline, training = Timeline(), Training()
    training.feed(timeline, 0)
    dashboard: Any = make(timeline)
    dashboard._refresher.stop()
    for step in (1, 2):
        training.feed(timeline, step)
    dashboard.refresh()
    dashboard.refresh()
    assert _steps_sent(dashboard) == [0, 1, 2]
    dashboard: Any = make(timeline)
    dashboard.sent.clear()
    dashboard._receive(dashboard, {"type": "hello"}, [])
    wait_until(lambda: sorted(_steps_sent(dashboard)) == [0, 1, 2], "the answer to hello")


def test_a_rank_that_does_not_answer_holds_nobody_up(make: Made) -> None:
    """While its thread waits for the ranks the dashboard can be drawn, as the end of every cell does."""
    made, asked, answer, over = (threading.Event() for _ in range(4))

    def status() -> tuple[()]:
        if made.is_set():
            asked.set()
            answer.wait(DEADLINE_S)
            over.set()
        return ()

    shown = make(Timeline(), status=status)
    made.set()
    try:
        assert asked.wait(DEADLINE_S)
        shown.snapshot()
        assert shown.svg().startswith("<svg")
        assert not over.is_set()
    finally:
        answer.set()


@pytest.mark.parametrize("entry", ["app/dashboard.js", "app/cluster_panel.js", "app/background_cell.js"])
def test_each_file_of_the_page_imports_what_it_uses(entry: str) -> None:
    """Joined, all files see each other's names: a missing import would only be noticed by whoever reads one alone."""
    texts = {path: bundle._read(path) for path in bundle.modules_of(entry)}
    exported = {name for text in texts.values() for name in bundle._EXPORT.findall(text)}
    for path, text in texts.items():
        code = re.sub(r"//.*$", "", bundle._IMPORT.sub("", text), flags=re.MULTILINE)
        known = " ".join(one.group() for one in bundle._IMPORT.finditer(text))
        for name in exported:
            used = rf"(?<![\w.$]){name}\b(?!:)" if name.isupper() else rf"(?<![\w.$]){name}\("
            own = rf"(function|class|const|let) (\[[^\]=]*)?{name}\b|^  {name}\(.*\) {{$"
            if re.search(used, code) and not re.search(own, code, re.MULTILINE):
                assert re.search(rf"\b{name}\b", known), (path, name)


def test_a_message_holds_every_block(make: Made) -> None:
    """The buffer is float32 and as long as the blocks in the header."""
    timeline = Training(3, 4).trained(1)
    dashboard: Any = make(timeline)
    (content, (body,)) = next(pair for pair in dashboard.sent if pair[0]["type"] == "steps")
    sizes = {"R2": 6, "R3": 9, "8": 8, "RB6": 72, "RB": 12, "B": 4, "DRB2": 0}
    assert len(body) == 4 * sum(sizes[shape] for _, shape in BLOCKS)
    assert content["steps"][0]["ranks"] == [0, 1, 2]
    assert content["steps"][0]["complete"] is True


def test_messages_are_bounded(make: Made) -> None:
    """A thousand steps that wait are sent newest first, in messages of at most a few hundred kilobytes."""
    timeline, training = Timeline(), Training(8, 20)
    dashboard: Any = make(timeline)
    dashboard._refresher.stop()
    for step in range(100):
        training.feed(timeline, step, 10**12 + step * 10**8)
    dashboard.refresh()
    assert max(len(buffers[0]) for content, buffers in dashboard.sent if buffers) < 400_000
    assert 99 in _steps_sent(dashboard)
    assert 0 not in _steps_sent(dashboard)
    while dashboard._shown.feed.unsent:
        dashboard.refresh()
    assert sorted(_steps_sent(dashboard)) == list(range(100))


def test_only_facts_that_changed_are_sent(make: Made) -> None:
    """Equal facts that were computed again are not sent with those of another view."""
    dashboard: Any = make(Timeline())
    dashboard.stop()
    dashboard._show({"facts": {"inspection": {"text": "a"}, "findings": {"items": []}}})
    dashboard.sent.clear()
    dashboard._show({"facts": {"inspection": {"text": "a"}, "findings": {"items": ["b"]}}})
    assert [(content["view"], content["facts"]) for content, _ in dashboard.sent] == [("findings", {"items": ["b"]})]


def test_what_the_browser_is_told_of_a_model(make: Made) -> None:
    """Parameters' names, the ranks' rows, the time that a measured link needs for each bucket, and, when asked, the
    times of a bucket's gradients."""
    link = CommModel(latency_ns=0, ns_per_byte=0.5)
    dashboard: Any = make(Training(4, 3).trained(1), link=lambda: link)
    assert dashboard.models["assignments"]["0:0"]["parameters"][0]["name"] == "layers.0.weight"
    assert [row["rank"] for row in dashboard.ranks] == [0, 1, 2, 3]
    assert [dashboard.ranks[0][name] for name in ("state", "dropped", "step")] == ["running", 0, 0]
    found = dashboard.models["links"]["0:0"]
    assert found["ns"] == [1.5 * 0.5 * 2**20] * 3
    assert found["limit"] == pytest.approx(2.0)
    dashboard._receive(dashboard, {"type": "gradients", "reducer": 0, "step": 0, "bucket": 1}, [])
    wait_until(lambda: any(content["type"] == "gradients" for content, _ in dashboard.sent), "the answer")
    (answer,) = [content for content, _ in dashboard.sent if content["type"] == "gradients"]
    assert len(answer["ready"]) == 4
    assert [len(mark["x"]) for mark in answer["blocks"][0]["scene"]["panels"][0]["marks"]] == [4] * 4


def test_a_cleared_timeline_begins_anew(make: Made) -> None:
    """After `Timeline.clear` the browser is told to forget, and gets the new steps. What was found in steps that are
    forgotten is forgotten, too, also before there are others."""
    dashboard: Any = make(timeline := Training().trained(3))
    dashboard._refresher.stop()
    timeline.clear()
    Training(2, 5).feed(timeline, 0)
    dashboard.refresh()
    kinds = [content["type"] for content, _ in dashboard.sent if content["type"] != "facts"]
    assert kinds == ["steps", "reset", "steps"]
    assert [one for one, _ in dashboard.sent if one["type"] == "steps"][-1]["steps"][0]["buckets"] == 5
    timeline = Training(delays={(1, 1): 9.0}).trained(20, ms=100)
    dashboard: Any = make(timeline)
    dashboard._receive(dashboard, {"type": "look", "id": "page", "views": ["findings", "stragglers"], "reducer": 0}, [])
    wait_until(lambda: {"findings", "stragglers"} <= dashboard.facts.keys(), "findings")
    assert dashboard.facts["findings"]["count"]
    timeline.clear()
    wait_until(lambda: [dashboard.facts[name] for name in ("findings", "stragglers")] == [{}, {}], "none")


def test_stopped_it_keeps_its_steps(make: Made) -> None:
    """After `stop` the last steps are in a trait, nothing new is followed, and no thread is left."""
    timeline, training = Timeline(), Training()
    training.feed(timeline, 0)
    dashboard: Any = make(timeline)
    dashboard.stop()
    training.feed(timeline, 1)
    assert [head["step"] for head in dashboard.kept["header"]["steps"]] == [0]
    assert not dashboard._refresher.running
    assert 1 not in _steps_sent(dashboard)


def test_the_models_that_trained_last_are_kept(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook keeps steps of the four models that trained last, whatever their numbers, and the same of each."""
    timeline, training = Timeline(), Training()
    for order, training.reducer in enumerate((0, 1, 2, 3, 4, 5, 1)):
        for step in range(3):
            training.feed(timeline, step + 3 * (order > 5), 10**12 + (4 * order + step) * 10**9)
    dashboard: Any = make(timeline)
    size = dashboard._shown.frames.latest().times_ns.nbytes
    monkeypatch.setattr("ddp_lab.dashboard.step_feed._KEPT_BYTES", 4 * 2 * size)
    heads = dashboard._shown.feed.newest()["header"]["steps"]
    assert [(head["reducer"], head["step"]) for head in heads] == [
        (3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (5, 2), (1, 4), (1, 5)
    ]  # fmt: skip


def test_compares_gradients_on_request(make: Made) -> None:
    """The button's message asks the ranks, and their answers, all of one step, become a verdict with norms; without
    ranks, as of a loaded timeline, it says so."""
    timeline, asked = Timeline(), []
    Training().feed(timeline, 0, 10**9)
    dashboard: Any = make(timeline, request_inspection=lambda reducer, step: asked.append((reducer, step)))
    dashboard._receive(dashboard, {"type": "compare", "reducer": 0, "step": 0}, [])
    wait_until(lambda: dashboard.facts["inspection"].get("state") == "asked", "the question")
    assert asked[0] == (0, 0)
    for rank, checksum in ((0, "aa"), (1, "ab")):
        entries = [{"bucket": 0, "norm": 1.5, "checksum": "00"}, {"bucket": 1, "norm": 2.5, "checksum": checksum}]
        timeline.describe(rank, {"type": "inspection", "reducer": 0, "step": 0, "buckets": entries, "session": 1})
    wait_until(lambda: dashboard.facts["inspection"]["state"] == "differ", "the verdict")
    assert dashboard.facts["inspection"]["buckets"]["0"] == {"equal": True, "norms": {"0": 1.5, "1": 1.5}}
    assert dashboard.facts["inspection"]["buckets"]["1"]["equal"] is False
    assert "bucket 1" in dashboard.facts["inspection"]["text"]
    timeline = Training().trained(1)
    dashboard: Any = make(timeline)
    dashboard._receive(dashboard, {"type": "compare", "reducer": 0, "step": 0}, [])
    wait_until(lambda: dashboard.facts["inspection"].get("state") == "failed", "the answer")
    assert "no running ranks" in dashboard.facts["inspection"]["text"]


def test_a_followed_job_has_no_controls(tmp_path: Path) -> None:
    """Of a job that another process runs there are the views that need no ranks, and nothing is offered of them."""
    with follow(str(tmp_path)) as job:
        shown = job.dashboard()
    recorded = Timeline()
    recorded.recorded = True
    saved = recorded.dashboard()
    try:
        assert shown.tabs == saved.tabs
        assert not {"step", "fault_injection", "collectives"} & {name for names in shown.tabs for name in names}
        for one, words in ((shown, "No step recorded yet. Train with"), (saved, "No step was recorded.")):
            assert [one.status["means"][name] for name in ("compare", "link", "control")] == [False] * 3
            assert words in one.status["means"]["nothing"]
            assert words in one.svg()
            assert "%%distributed" not in one.svg()
    finally:
        for one in (shown, saved):
            one.close()
            one.layout.close()


def test_sends_nothing_while_nothing_happens(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that looks is given words while steps come; then a last one, and no message more until the next step.

    What takes long to find on a busy machine may still come after a last word; then another one follows.
    """
    monkeypatch.setattr("ddp_lab.dashboard.dashboard._CALM_SECONDS", 0.3)
    monkeypatch.setattr("ddp_lab.dashboard.dashboard._WORD_SECONDS", 0.05)
    timeline, training = Timeline(), Training()
    dashboard: Any = make(timeline)
    dashboard._receive(dashboard, {"type": "here", "id": "page", "seen": True}, [])
    dashboard.observe(lambda change: dashboard.sent.append((change, None)))

    def silent() -> bool:
        told = list(dashboard.sent)
        for _ in range(20):
            dashboard._tick()
        return told == dashboard.sent and told[-1] == ({"type": "word", "last": True}, None)

    for step in range(2):
        training.feed(timeline, step)
        dashboard.sent.clear()
        wait_until(lambda: {"type": "word"} in [content for content, _ in dashboard.sent], "a word")
        wait_until(silent, "the last word, and nothing after it")
    dashboard.unobserve_all()


def test_a_cluster_that_was_never_started_was_not_stopped() -> None:
    """A dashboard of a cluster that does not run says so; that it was stopped only if its ranks were heard of."""
    cluster = Cluster(2, backend="gloo")
    assert life_of(cluster, {})["what"] == "The cluster is not running"
    cluster.timeline.set_status(0, {"state": "idle"})
    assert life_of(cluster, {})["what"] == "The cluster was stopped"


def test_the_mime_bundle_has_a_picture_and_words(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers without widgets find an SVG and the finding in words. The words below a picture are found under the lock
    of the thread that takes new steps."""
    timeline = Timeline()
    dashboard = make(timeline)
    data, _ = dashboard._repr_mimebundle_()
    assert "No step recorded yet" in data["image/svg+xml"]
    Training().feed(timeline, 0)
    dashboard.refresh()
    data, _ = dashboard._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "image/svg+xml", "text/plain"}
    assert data["image/svg+xml"].startswith("<svg")
    assert "DigitsNet on 2 ranks" in data["text/plain"]
    timeline = Training().trained(1)
    dashboard: Any = make(timeline)
    looked, reducers = [], dashboard._shown.frames.reducers
    monkeypatch.setattr(
        dashboard._shown.frames, "reducers", lambda: looked.append(dashboard._lock._is_owned()) or reducers()
    )
    dashboard.snapshot()
    assert looked
    assert all(looked)


def test_how_the_refreshing_thread_ends(make: Made) -> None:
    """An error on the thread ends it and is shown in the widget, not lost. The refreshing thread does not keep its
    widget alive, and ends with it."""

    def status() -> list[Any]:
        raise RuntimeError("the controller is gone")

    timeline: Any = Timeline()
    dashboard: Any = make(timeline)
    dashboard._shown._status = status
    wait_until(lambda: "the controller is gone" in dashboard.notice, "the notice")
    wait_until(lambda: not dashboard._refresher.running, "the end of the thread")

    class Owner:
        def act(self) -> bool:
            return True

        def failed(self, error: BaseException) -> None:
            raise error

    owner = Owner()
    refresher = Refresher(owner.act, owner.failed, 100)
    refresher.start()
    assert refresher.running
    del owner
    wait_until(lambda: not refresher.running, "the end of the thread")


def test_a_thread_that_is_about_to_stop_goes_on_when_it_is_asked_to() -> None:
    """A message that comes in the round in which the thread stops itself is not left lying until the next one."""
    rounds = threading.Semaphore(0)

    class Owner:
        def act(self) -> bool:
            rounds.release()
            asked.wait(0.001)
            refresher.stop()
            return True

        def failed(self, error: BaseException) -> None:
            raise error

    owner, asked = Owner(), threading.Event()
    refresher = Refresher(owner.act, owner.failed, 1000)
    for _ in range(100):
        refresher.start()
        assert rounds.acquire(timeout=DEADLINE_S)
    wait_until(lambda: not refresher.running, "the end of the thread")


def test_the_workaround_is_guarded() -> None:
    """Without the private method that it replaces, nothing is done."""

    class Comm:
        pass

    class Widget:
        comm: Any = Comm()

    assert receive_while_busy(Widget()) is False
    Widget.comm._reply_subshell_for = lambda data, default: "main"
    assert receive_while_busy(Widget()) is True
    assert Widget.comm._reply_subshell_for({}, "subshell") == "subshell"


def test_the_module_has_no_imports_left() -> None:
    """Each joined module is self-contained, and no file belongs to none of them."""
    entries = ["app/dashboard.js", "app/cluster_panel.js", "app/background_cell.js", "app/output_views.js"]
    for entry in entries:
        text = bundle.module_text(entry)
        assert "import {" not in text
        assert len(re.findall(r"^export ", text, re.MULTILINE)) == 1
        assert "export default" in text
    static = Path(bundle.__file__).parent / "static"
    there = {path.relative_to(static).as_posix() for path in static.rglob("*.js")}
    assert there | {"generated.js"} == {path for entry in entries for path in bundle.modules_of(entry)}


def test_views_alone(make: Made) -> None:
    """Each view is a widget of its own, with a picture of its own; an unknown one is refused."""
    timeline = Training(delays={(1, 1): 4.0}).trained(20)
    names = ("overview", "timeline", "sync", "overlap", "stragglers", "buckets", "findings")
    drawn = set()
    for name in names:
        one = make(timeline, views=[name])
        assert one.tabs == [[name]]
        drawn.add(one.svg())
    assert len(drawn) == len(names)
    with pytest.raises(ValueError, match="choose from overview, timeline"):
        Dashboard(timeline, views=["histogram"])


def test_marks_are_sent_with_their_names(make: Made) -> None:
    """A mark of the program reaches the browser once, with rank, time and name, and again for a page that is opened."""
    timeline, training = Timeline(), Training()
    training.feed(timeline, 0, 10**12)
    timeline.describe(1, {"type": "mark", "index": 0, "name": "epoch", "session": 1})
    mark = {"host_ns": 5 * 10**9, "kind": Kind.MARK, "parameter": 0}
    timeline.extend(Batch(1, 1, 10**6, 0, rows(mark, first=10**6)))
    dashboard: Any = make(timeline)
    dashboard._refresher.stop()
    dashboard.refresh()
    sent = [content["marks"] for content, _ in dashboard.sent if content["type"] == "marks"]
    assert sent == [[(1, 5.0, "epoch", None)]]
    dashboard._shown.feed.resend()
    dashboard.refresh()
    assert [content["type"] for content, _ in dashboard.sent].count("marks") == 2


def test_a_step_that_grows_waits_before_it_is_sent() -> None:
    """A step that has just begun is not sent, one that goes on is after a while, and its end at once."""
    timeline, training = Timeline(), Training(2, 2)
    sent: list[Any] = []
    feed = StepFeed(timeline, lambda *message: sent.append(message))
    for rank in range(2):
        timeline.describe(rank, training.assignment() | {"session": 1})
    for rank, events in enumerate(training.step(0, 10**12)):
        timeline.extend(Batch(rank, 1, 0, 0, events[: len(events) // 2]))
    feed.take()
    assert not feed.send()
    wait_until(feed.send, "the step as far as it is")
    for rank, events in enumerate(training.step(0, 10**12)):
        timeline.extend(Batch(rank, 1, 0, 0, events))
    feed.take()
    assert feed.send()
    assert sent[-1][0]["steps"][0]["complete"]


def test_a_step_that_grows_is_not_sent_while_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While steps end often, one is sent when it has ended on each rank, though a rank comes three steps late."""
    timeline, training = Timeline(), Training(2, 2)
    now, sent = [10.0], list[Any]()
    feed = StepFeed(timeline, lambda *message: sent.append(message))
    monkeypatch.setattr("ddp_lab.dashboard.step_feed.time.monotonic", lambda: now[0])
    for rank in range(2):
        timeline.describe(rank, training.assignment() | {"session": 1})
    steps, begun = [training.step(step, 10**12 + step * 10**8) for step in range(8)], [0, 0]
    for newest in range(8):
        for rank, step in enumerate((newest, newest - 3)):
            if step >= 0:
                timeline.extend(Batch(rank, 1, begun[rank], 0, steps[step][rank]))
                begun[rank] += len(steps[step][rank])
        now[0] += 0.06
        feed.take()
        feed.send()
    assert timeline.finished_steps(0, np.arange(10)).tolist() == [True] * 5 + [False] * 3 + [True] * 2
    heads = [head for content, _ in sent for head in content["steps"]]
    assert [(head["step"], head["complete"]) for head in heads] == [(0, False), *((step, True) for step in range(5))]


def test_when_events_are_taken_and_sent() -> None:
    """Reads within see what had arrived at its begin, and nothing is lost. Few ranks drain every 20 ms; of more than 25
    all together send 1,250 batches a second."""
    timeline, training = Timeline(), Training(1, 2)
    training.feed(timeline, 0)
    with timeline.snapshot_of_events():
        assert timeline.held_steps(0).tolist() == [0]
        training.feed(timeline, 1)
        assert timeline.held_steps(0).tolist() == [0]
    assert timeline.held_steps(0).tolist() == [0, 1]
    assert [interval_of(ranks) for ranks in (1, 8, 25)] == [0.02] * 3
    assert 64 / interval_of(64) == pytest.approx(1250)


def test_the_legend_has_the_words_of_pictures_and_glossary() -> None:
    """Browser and pictures name the parts of a bucket's bar alike; each name is a term of the glossary."""
    generated = bundle.module_text("app/dashboard.js")
    (parts,) = re.findall(r"^(?:export )?const PARTS = (\[.*\]);$", generated, re.MULTILINE)
    assert [one["label"] for one in json.loads(parts)] == [*palette.LABELS.values()]
    assert tuple(palette.LABELS) == palette.PARTS
    training = Training(2, 3, delays={(1, 1): 2.0})
    frame = StepFrames(training.timeline(*enumerate(training.step(0, 10**12)))).latest()
    drawn = {one.name for one in timeline_scene(frame).panels[0].marks if isinstance(one, Spans) and one.name}
    assert drawn == {*palette.LABELS.values()}
    glossary = (Path(__file__).resolve().parents[3] / "tutorials/site/glossary.md").read_text(encoding="utf-8")
    assert {*palette.LABELS.values()} - {"exposed"} <= {*re.findall(r"^(\S.*)$", glossary, re.MULTILINE)}
    assert "exposed communication" in glossary
