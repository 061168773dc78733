"""Timeline: what all ranks' events say, from batches to spans per rank, step and bucket.

The receiver thread appends (`extend`, `describe`, `set_status`); any other thread reads. Raw events are kept for
readers with a cursor and for `save`; the times of steps and buckets are kept in dense tables, which reach further
back. Everything is bounded, and what was lost is counted and shown.
"""

from __future__ import annotations

import gzip
import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis import findings
from ..analysis.findings import Facts, Finding
from ..files import replacing, write_text
from ..protocol.journal import SUFFIX
from ..simulation.workload import Workload
from . import judged_steps, what_if, workloads
from . import summary as words
from .clocks import HostClock, clocks_of
from .model import TimelineModel
from .recorded import chrome_trace, merge, saved
from .recorded.player import Player
from .records import Inspection, Kept, LatePlace, RankStatus, ReducerInfo
from .tables import span_columns
from .tables.gradients import ALL_BUCKETS, drift_columns, gradient_columns, gradient_norm_columns, noise_scale
from .tables.span_columns import Columns

if TYPE_CHECKING:
    import pandas as pd
    from ipywidgets import DOMWidget

    from ..simulation.link_model import LinkModel

__all__ = ["Inspection", "Kept", "LatePlace", "RankStatus", "RecordedRun", "ReducerInfo", "Timeline", "read_run"]

_JUDGED_STEPS = 100  # complete steps that findings and late ranks are told of


class Timeline(TimelineModel):
    """Events of all ranks, by rank, reducer, step and bucket.

    Two models in one program are two reducers. Buckets that were assigned anew are a new generation. A rank whose
    process was replaced goes on under its number, and models that it builds then are new reducers.

    Args:
        max_steps: steps of each model to keep, and a quarter as many of those before: evenly spaced ones of the whole
            past ([Note: old steps are thinned] in `step_table.py`; `kept` tells which). 8 ranks with 50 buckets and 400
            parameters take 49 kB a step: 61 MB in all.
        max_events: raw events to keep for `since` and `save`, 72 bytes each, and a quarter as many of old steps.
    """

    @property
    def clocks(self) -> tuple[HostClock, ...]:
        """The hosts whose times were moved onto one axis, by how much, and how exactly; empty for a single clock.

        Times of spans of different hosts can be compared within ``uncertain_ns``.
        """
        return clocks_of({one.rank: one.status for one in self.ranks()})

    def spans(self, reducer: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """One row per rank, step and bucket.

        Columns: ``rank``, ``reducer``, ``process_group`` (index on that rank), ``step``, ``generation`` (of the
        assignment), ``bucket``, ``bytes``, ``n_parameters``. Host times in ns, 0 where it has not happened:
        ``backward_begin_ns``, ``first_ready_ns`` (first gradient of the bucket), ``ready_ns`` (its last one),
        ``launched_ns``, ``reduced_ns``, ``finalize_ns`` (the rank's own computation was over); device times on
        the same axis, 0 on a CPU: ``device_begin_ns``, ``device_end_ns``. Milliseconds since ``backward_begin_ns``,
        NaN where it has not happened: ``first_ready_ms``, ``ready_ms``, ``launched_ms``, ``reduced_ms``. Durations:
        ``fill_ms`` (first gradient to ready), ``all_reduce_ms`` (launched to reduced, waiting for other ranks
        included), ``device_ms``, ``hidden_ms`` and ``exposed_ms`` (parts of the collective before and after the
        end of the rank's computation, on ``clock``: "host" or "device"). ``complete``: the backward has ended.

        Args:
            reducer: which model; None for all.
            last_steps: only so many newest steps of each; None for all that are kept.
        """
        return _frame(self.columns(reducer, last_steps))

    def steps(self, reducer: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """One row per rank and step.

        Columns: ``rank``, ``reducer``, ``step``, ``generation``, ``state`` ("running", "complete", "abandoned"),
        ``buckets``, ``bytes`` (launched), ``forward_begin_ns``, ``forward_end_ns``, ``backward_begin_ns``,
        ``finalize_ns``, ``backward_end_ns`` (host), ``step_ms`` (from the end of the step before), ``forward_ms`` (of
        the last forward before the backward), ``backward_ms``, ``compute_ms`` (the backward's own computation),
        ``communication_ms`` (at least one collective under way), of which ``hidden_ms`` under the computation and
        ``exposed_ms`` after it, on ``clock``.
        """
        return _frame(self.step_columns(reducer, last_steps))

    def sync(self, reducer: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """Gradient sync: one row per reducer, step and bucket that all ranks have reduced.

        Columns: ``reducer``, ``step``, ``generation``, ``bucket``, ``bytes``, ``n_parameters``, ``ranks`` (number),
        ``all_reduce_ms`` (last rank's launch to last rank's reduced), ``bandwidth_gb_s`` (bytes over that time,
        10⁹ bytes), ``last_rank`` (to launch), ``late_ms`` (last launch minus first), ``alone_ms`` (last launch
        minus the last but one: all others waited for that rank alone; NaN for one rank), ``wait_ms`` (dict rank -> ms
        that its launched collective waited for the last rank's), ``hidden_ms`` and ``exposed_ms`` (mean over the
        ranks). Between ranks of different hosts times are as exact as `clocks` says.
        """
        return _frame(self.sync_columns(reducer, last_steps))

    def gradients(self, reducer: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """Watched gradients (`DistributedDataParallel.watch_gradients`): a row for each step and bucket.

        Columns: ``reducer``, ``step``, ``generation``, ``bucket`` (-1: all together), ``ranks`` (with gradients),
        ``before`` (dict rank -> Euclidean norm of that rank's own gradients) and its ``before_mean``, ``before_min``,
        ``before_max``; ``after`` (norm of the average); ``signal`` and ``noise``: estimates of the squared norm of the
        true gradient and of the noise in a rank's, whose ratio is the noise scale ([Note: gradient noise scale]);
        ``nonfinite`` ("NaN", "Inf" or ""), ``nonfinite_rank`` and ``nonfinite_parameter``: where it was seen first;
        ``cost_ms``: what watching the step cost the first rank.

        Args:
            reducer: which model; None for all.
            last_steps: only so many newest steps of each; None for all that are kept.
        """
        return _frame(gradient_norm_columns(self.watched_gradients(reducer, last_steps)))

    def drift(self, reducer: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """Comparisons of the ranks' replicas (`watch_drift`, `Cluster.check_drift`): a row for each.

        Columns: ``reducer``, ``step`` (synchronised backwards before it), ``ok``, ``first`` (name of the first
        parameter or buffer that differs, "" for none), ``groups`` (ranks that hold equal values of it, together),
        ``differing`` (how many differ), ``tensors`` and ``bytes`` (how much was compared), ``cost_ms``, ``error`` (why
        it could not be done, else ""). They come from rank 0 of the model's group.

        Args:
            reducer: which model; None for all.
            last_steps: only so many newest comparisons of each; None for all that are kept.
        """
        return _frame(drift_columns(self.drift_records(reducer, last_steps)))

    def noise_scale(self, reducer: int | None = None, last_steps: int = 100) -> float:
        """The gradient noise scale over watched steps, in batches of a rank: see [Note: gradient noise scale].

        Times a rank's batch size it is the batch, in samples, up to which more data per step still pays. NaN if nothing
        was watched, or if the noise hides the gradient.
        """
        chosen = self.model(reducer)
        columns = gradient_norm_columns(self.watched_gradients(chosen.reducer if chosen else reducer, last_steps))
        together = columns["bucket"] == ALL_BUCKETS
        return noise_scale(columns["signal"][together], columns["noise"][together])

    def find_late(
        self,
        reducer: int | None = None,
        last_steps: int = _JUDGED_STEPS,
        minimum_ms: float = 1.0,
        minimum_share: float = 0.25,
    ) -> list[LatePlace]:
        """Names the ranks whose own computation falls behind, and the bucket and parameter where it does.

        Delays that a busy machine causes now and then, at any place, are not named. A rank for which the others wait in
        most steps is named also where its delay varies too much to tell the place: `LatePlace.where` says so.

        Args:
            reducer: which model; None for the most recently active.
            last_steps: how many complete steps to look at, of the last layout of the buckets that has some.
            minimum_ms: smaller delays are taken for noise.
            minimum_share: fraction of the steps in which a rank has to be late at that place.

        Returns:
            The most costly place first.
        """
        known = self.judgement(reducer, last_steps, minimum_ms=minimum_ms, minimum_share=minimum_share)
        return judged_steps.late_places(known) if known is not None else []

    def findings(self, reducer: int | None = None, last_steps: int = _JUDGED_STEPS) -> list[Finding]:
        """What to change, the largest gain first: each finding with its evidence, a remedy and an estimated gain.

        Args:
            reducer: which model; None for the most recently active.
            last_steps: how many complete steps to look at, of the last layout of the buckets that has some.
        """
        return findings.findings(self.judgement(reducer, last_steps))

    def judgement(self, reducer: int | None = None, last_steps: int = _JUDGED_STEPS, **options: float) -> Facts | None:
        """What findings, late ranks and the summary are made from: the times of the judged steps, and late places.

        Args:
            reducer: which model; None for the most recently active.
            last_steps: how many complete steps to look at, see [Note: the layout that is judged].
            options: of `judged_steps.facts`.

        Returns:
            None if no step is complete on all ranks.
        """
        chosen = self.model(reducer)
        known = self.layouts(chosen.reducer) if chosen is not None else []
        layout = judged_steps.newest(known)
        if chosen is None or layout is None:
            return None
        steps = layout.warm(judged_steps.WARM_UP, last_steps)
        newer = sum(int((one.step > steps[-1]).sum()) for one in known)
        return judged_steps.facts(self.views_of(chosen.reducer, steps), layout, steps, newer=newer, **options)

    # ---- what if ----------------------------------------------------------------------------------------

    def workload(self, reducer: int | None = None, last_steps: int = 50) -> Workload:
        """What one step computes and when its gradients are ready: what the simulator replays.

        Args:
            reducer: which model; None for the most recently active.
            last_steps: the medians are over so many steps.

        Raises:
            ValueError: no two steps in a row have been recorded with the present buckets.
        """
        return workloads.workload(self, reducer, last_steps=last_steps)

    def simulate(
        self, link: LinkModel | None = None, *, reducer: int | None = None, without_rank: int | None = None, **what: Any
    ) -> what_if.WhatIf[Timeline]:
        """Predicts the step with other buckets, hooks, worlds or links.

        Args:
            link: how long an all-reduce takes; None: fitted to the recorded ones.
            reducer: which model; None for the most recently active.
            without_rank: a rank that is taken to be as fast as the others: "without the straggler".
            what: fields of `ddp_lab.simulation.simulator.Configuration`: ``bucket_cap_mb`` (None: as recorded),
                ``order``, ``hook``, ``sync_every``, ``world_size``, ``overlap``, ``jitter_ns``.

        Example:
            timeline.simulate(bucket_cap_mb=5).step_ms
            timeline.simulate(world_size=64, sync_every=4).timeline().figure()
        """
        return what_if.what_if(self, link, reducer=reducer, without_rank=without_rank, **what)

    # ---- views ------------------------------------------------------------------------------------------

    def dashboard(self, *views: str) -> DOMWidget:
        """Returns a widget that shows this timeline: a recording's, say. It needs no ranks and no torch.

        `Cluster.dashboard` shows a cluster's timeline, and has controls for its ranks.

        Args:
            views: of ``"timeline"``, ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``, ``"findings"``,
                ``"what_if"`` and ``"gradients"``; none: all.

        Example:
            ddp_lab.Timeline.load("run.npz").dashboard()
        """
        return _above("widgets.dashboard").of_recording(self, views)

    def replay(self, *views: str, speed: float = 1.0) -> DOMWidget:
        """Returns a dashboard that plays what was recorded as if it happened now, with a bar to pause and to go back.

        Its ``player`` does the same from code: ``play()``, ``pause()``, ``seek(seconds)``, ``speed``. Pauses of more
        than a second, between two cells say, are played as one second.

        Args:
            views: as for `dashboard`.
            speed: seconds of the recording in one second; 0.05 shows how each step grows.

        Raises:
            ValueError: the speed is not positive, nothing was recorded, or there is no such view.

        Example:
            ddp_lab.Timeline.load("run.npz").replay(speed=0.1)
        """
        player = Player(self, speed=speed)
        return _above("widgets.dashboard").of_recording(player.timeline, views, player)

    def what_if(self) -> DOMWidget:
        """Returns a widget that predicts the step for what its sliders say, beside what was recorded."""
        return _above("widgets.view_widgets").WhatIfSliders(self)

    def report(self, path: str | os.PathLike[str], reducer: int | None = None) -> Path:
        """Writes one HTML page that needs no network: findings in words first, figures and tables after.

        Args:
            path: where to.
            reducer: which model; None for the most recently active.
        """
        target = Path(path)
        write_text(target, _above("report.page").page(self, reducer))
        return target

    def figure(self, view: str = "timeline", **options: Any) -> Any:
        """A view as a plotly figure, for reports.

        Args:
            view: ``"timeline"`` (the spans of a step), ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"`` or
                ``"findings"``.
            options: see `ddp_lab.views.figures.figure`.
        """
        return _above("views.figures").figure(self, view, **options)

    # ---- out --------------------------------------------------------------------------------------------

    def summary(self, reducer: int | None = None, last_steps: int = 200) -> str:
        """A few sentences computed from the events: what a step costs, what waited, who was late, what was lost."""
        chosen = self.model(reducer)
        if chosen is None:
            return words.NOTHING
        layout, found = self.judged(chosen.reducer), self.judgement(chosen.reducer)
        if layout is None or found is None:
            return words.incomplete(chosen, self._dropped())
        views = self.views_of(chosen.reducer, layout.warm(judged_steps.WARM_UP, last_steps))
        spans = span_columns.span_columns(views, {})
        facts = words.Facts(
            info=chosen,
            steps=span_columns.step_columns(views),
            sync=span_columns.sync_columns(spans, {chosen.reducer: len(chosen.ranks)}),
            late=judged_steps.late_places(found),
            assignment=layout.description,
            dropped=self._dropped(),
            findings=findings.findings(found),
            kept=self.kept(chosen.reducer),
            clocks=self.clocks,
        )
        return words.summary(facts)

    def _dropped(self) -> int:
        return sum(rank.dropped for rank in self.ranks())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the raw events that are kept and all descriptions to an ``.npz`` file; `load` reads it.

        Of more than ``max_events`` these are the newest ones, and before them those of evenly spaced steps, a quarter
        as many. What the file holds of a long run, `kept` of the loaded timeline tells.
        """
        return saved.write(Path(path), self.raw())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, partial: bool = False
    ) -> Timeline:
        """Reads what `save` wrote, or merges what ranks wrote.

        Args:
            path: a file of `save`; or files of ranks (of `ddp_lab.recording.save`, or journals of `ddp-lab run`), or a
                folder that holds such files: then they are merged, and clocks of several hosts are aligned.
            partial: ranks without a file are no error.

        Of a journal that is damaged, what stands before and after is read, and a warning says what is missing.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is no recording, or of another schema version; two are of the same rank, or of different
                runs; a rank has none.
        """
        files = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(file) for file in path]
        several = len(files) != 1 or files[0].is_dir() or files[0].suffix == SUFFIX
        made, _, damage = merge.read(files, cls, partial=partial or not several)
        for sentence in damage:
            warnings.warn(sentence, stacklevel=2)
        return made

    def to_perfetto(self, path: str | os.PathLike[str], *, last_steps: int | None = None) -> Path:
        """Writes a Chrome trace (JSON) for ui.perfetto.dev: one process per rank, a track for each bucket.

        Arrows lead from the gradient that completes a bucket to the rank's collective, and on to that of all ranks.
        Of more than 250,000 gradients only those that complete a bucket are shown, of more than 100,000 arrows only
        those of the rank that launched last; the trace says so in its ``otherData``.

        Args:
            path: where to; compressed if it ends in ``.gz``.
            last_steps: only so many newest steps of each model; None for all that are kept.
        """
        reducers = self.reducers()
        with self._lock:
            views, marks = self.views(None, last_steps), self.marks()
            buckets, sizes = self._book.buckets(), self._book.sizes()
            names = {one.reducer: self._book.names(one.reducer) for one in reducers}
        many = sum(view.gradients.size for view in views) > chrome_trace.MOST_GRADIENTS
        trace = chrome_trace.Trace(
            spans=span_columns.span_columns(views, sizes),
            steps=span_columns.step_columns(views),
            gradients=gradient_columns(views, buckets, completing=many),
            modules={one.reducer: one.module for one in reducers},
            names=names,
            marks=marks,
            notes=[note for note in (str(self.kept(one.reducer)) for one in reducers) if note],
        )
        target = Path(path)
        with replacing(target) as file:
            if target.suffix == ".gz":
                with gzip.GzipFile(target.stem, "wb", 1, file) as packed:
                    chrome_trace.write(packed, trace)
            else:
                chrome_trace.write(file, trace)
        return target


def _above(module: str) -> Any:
    """A module that shows timelines: the one place where a package asks one above it, and only when a user does."""
    return importlib.import_module(f"ddp_lab.{module}")


def _frame(columns: Columns) -> pd.DataFrame:
    import pandas as pd  # half a second: only when a table is asked for

    frame: pd.DataFrame = pd.DataFrame(columns)
    return frame


@dataclass(frozen=True)
class RecordedRun:
    """Files of one run, merged.

    Attributes:
        timeline: of all its ranks.
        notices: sentences on what a reader of the timeline should know: who is missing, who was killed, how the clocks
            were aligned, what is damaged.
        damage: those of them on what of the files is damaged or missing.
    """

    timeline: Timeline
    notices: tuple[str, ...]
    damage: tuple[str, ...] = ()


def read_run(paths: Sequence[str | os.PathLike[str]], *, partial: bool = False) -> RecordedRun:
    """Merges files that ranks wrote.

    Args:
        paths: files, or folders that hold them.
        partial: ranks without a file are said in a notice, and are no error.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no recording or of another schema version; two are of the same rank, or of different
            runs; a rank of a model has none.
    """
    return RecordedRun(*merge.read(paths, Timeline, partial=partial))
