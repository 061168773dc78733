"""Timeline: the events of all ranks, from batches to spans per rank, step and bucket.

The receiver thread appends (`extend`, `describe`, `set_status`); any other thread reads. Raw events are kept for
readers with a cursor and for `save`; the times of steps and buckets are kept in dense tables, which reach further
back. Everything is bounded, and losses are counted and shown.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis import findings
from ..analysis.findings import Finding
from ..analysis.step_parts import StepParts
from ..analysis.stragglers import LatePlace
from ..files import write_text
from ..protocol import archive
from ..simulation.workload import Workload
from . import collective_summary, steady_steps, what_if
from . import summary as words
from .clocks import HostClock, clocks_of
from .event_tables import TimelineModel
from .recorded import chrome_trace, merge
from .recorded.player import Player
from .records import Inspection, Kept, RankStatus, ReducerInfo
from .tables import memory
from .tables.collectives import GroupInfo
from .tables.gradients import ALL_BUCKETS, drift_columns, gradient_norm_columns, noise_scale
from .tables.span_columns import Columns

if TYPE_CHECKING:
    import pandas as pd
    from ipywidgets import DOMWidget

    from ..simulation.link_model import CommModel

__all__ = [
    "GroupInfo",
    "Inspection",
    "Kept",
    "LatePlace",
    "RankStatus",
    "RecordedRun",
    "ReducerInfo",
    "Timeline",
    "read_run",
]


class Timeline(TimelineModel):
    """Events of all ranks, by rank, model, step and bucket.

    Each model in a program has its own number: its `model_id`, which methods take as ``model`` and tables have in the
    column ``reducer``. Each bucket layout has a generation number, which grows with every rebuild. A rank whose process
    was restarted keeps its number, and the models that it builds then are new ones.

    Methods that return a table take ``model`` (None: all models) and ``last_steps``: how many of the newest steps of
    each model (None: all that are kept). The table has the columns ``reducer`` (the model) and ``step``, and where rows
    differ in it ``rank`` and ``generation`` (of the bucket layout).

    For other methods, the model None is the most recently active one; they analyse the ``last_steps`` newest complete
    steps of its last bucket layout that has some.

    Args:
        max_steps: how many of the newest steps of each model to keep. A quarter as many older steps are kept, too,
            evenly spaced over the whole past (see `kept`). 8 ranks with 50 buckets and 400 parameters take 49 kB per
            step: 61 MB in total.
        max_events: how many raw events to keep for `since` and `save`, 72 bytes each, and a quarter as many of old
            steps.
    """

    @property
    def clocks(self) -> tuple[HostClock, ...]:
        """The hosts whose timestamps were clock-aligned, the offset and its uncertainty; empty for a single clock.

        Times of spans on different hosts can be compared within ``uncertain_ns``.
        """
        return clocks_of({one.rank: one.status for one in self.ranks()})

    def spans(self, model: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """One row per rank, step and bucket.

        Columns:

        - ``process_group`` (index on that rank), ``bucket``, ``bytes``, ``n_parameters``
        - host times in ns, 0 if not yet known: ``backward_begin_ns``; ``first_ready_ns`` (first gradient of the
          bucket); ``ready_ns`` (its last one); ``launched_ns``; ``reduced_ns``; ``finalize_ns`` (end of the rank's own
          computation)
        - device times on the same axis, 0 on a CPU: ``device_begin_ns``, ``device_end_ns``
        - milliseconds since ``backward_begin_ns``, NaN if not yet known: ``first_ready_ms``, ``ready_ms``,
          ``launched_ms``, ``reduced_ms``
        - ``fill_ms``: from the first gradient to ready
        - ``all_reduce_ms``: from launched to reduced, waiting for other ranks included
        - ``device_ms``: the same on the device
        - ``hidden_ms`` and ``exposed_ms``: the parts of the collective before and after the end of the rank's
          computation, on ``clock`` ("host" or "device")
        - ``complete``: whether the backward has ended
        """
        return _frame(self.columns(model, last_steps))

    def steps(self, model: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """One row per rank and step.

        Columns:

        - ``state``: "running", "complete" or "abandoned"
        - ``buckets`` and ``bytes``: what was launched
        - host times in ns: ``forward_begin_ns``, ``forward_end_ns``, ``backward_begin_ns``, ``finalize_ns``,
          ``backward_end_ns``
        - ``step_ms``: since the end of the previous step
        - ``forward_ms``: of the last forward before the backward
        - ``backward_ms``, and ``compute_ms``: the backward's own computation
        - ``communication_ms``: time with at least one collective in flight. ``hidden_ms`` of it is overlapped with the
          computation, and ``exposed_ms`` is after it, on ``clock`` ("host", "device"; "none": it is not known)
        - ``data_ms``, ``optimizer_ms`` and ``accumulation_ms``: data loading, the optimizer, and forwards of gradient
          accumulation

        Of a model with `fully_shard` or `replicate`, ``exposed_ms`` is how long the rank waited for its collectives in
        the whole step, and ``forward_ms`` and ``compute_ms`` are without that; NaN where it is not known, see
        `parameter_groups`. On a device, ``exposed_ms`` and ``step_ms`` of such a model are the device's, the other
        times the host's.
        """
        return _frame(self.step_columns(model, last_steps))

    def all_reduces(self, model: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """Gradient sync: one row per model, step and bucket that all ranks have reduced.

        Columns:

        - ``bucket``, ``bytes``, ``n_parameters``, and ``ranks``: their number
        - ``all_reduce_ms``: from the last rank's launch to the last rank's reduced
        - ``bandwidth_gb_s``: 10⁹ bytes a second in that time
        - ``last_rank``: the last one to launch
        - ``late_ms``: the last launch minus the first
        - ``alone_ms``: the last launch minus the last but one, in which all others waited for that rank; NaN for one
          rank
        - ``wait_ms``: dict rank -> ms that its launched collective waited for the last rank's
        - ``hidden_ms`` and ``exposed_ms``: means over the ranks

        Between hosts, times have the uncertainty given by `clocks`.
        """
        return _frame(self.sync_columns(model, last_steps))

    def collectives(self, last: int | None = None) -> pd.DataFrame:
        """Every operation of every process group, from any source: one row per rank and operation.

        Recorded in cells and by ``ddp-lab run``, with or without a DistributedDataParallel. Each rank's newest 16,384
        operations are kept; ``last``: how many of them (None: all).

        Columns, what it is:

        - ``rank``, and ``group``: number of a record of `groups`
        - ``operation``: for example "all_reduce"
        - ``sequence``: its number in the group, equal on all its ranks; of a send or receive: among those of this pair
        - ``peer``: global rank of the other side of a send or receive, else -1
        - ``bytes``: of its input or output, whichever is more
        - ``dtype``, and ``reduction``: for example "sum"
        - ``place`` (file and line of the user's innermost frame) and ``function``
        - ``module``: whose parameters `fully_shard` has it for
        - ``use``: what for: "forward", "backward", "forward ahead" and "backward ahead" if it was prefetched,
          "reduction", "evaluation"; else ""
        - ``reducer`` and ``bucket``: of a DistributedDataParallel, or a parameter group's number; else -1

        Columns, when it was:

        - in ns, 0 if not known: ``entered_ns``, ``ended_ns``, ``device_begin_ns``, ``device_end_ns`` (where it ran on a
          device; then it ended at the latter)
        - ``state``: "running", "complete", "failed"; "unseen" if its backend does not report when it ends
        - ``ms``: from entered to ended
        - ``waited_ms``: how long a thread of the host waited for it, which only gloo and shm report; or a device, where
          `fully_shard` communicates on it
        - ``ranks``: number of ranks that have entered it
        - ``last_rank``: the last one to enter, -1 until all have
        - ``late_ms``: entered after the first rank
        - ``wait_ms``: until the last rank entered
        - ``transfer_ms``: from the last rank's entering to this rank's end
        - ``bus_gb_s``: 10⁹ bytes a second over each link of a ring in that time
        """
        return _frame(self.collective_columns(last))

    def parameter_groups(self, model: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """What `fully_shard` (FSDP2, HSDP) and `replicate` did: one row per rank, step and parameter group.

        Columns:

        - ``group``: number of the parameter group
        - ``module``: its name; the class of the model for the root's own parameters
        - ``forward_unshard_ms`` and ``forward_unshard_exposed_ms``: all-gathers before a forward
        - ``backward_unshard_ms`` and ``backward_unshard_exposed_ms``: all-gathers before a backward
        - ``reduce_scatter_ms`` and ``reduce_scatter_exposed_ms``
        - ``all_reduce_ms`` and ``all_reduce_exposed_ms``: of HSDP and `replicate`
        - ``forward_unshards`` and ``backward_unshards``: counts; with gradient accumulation, of all forwards of a step
        - ``forward_prefetched`` and ``backward_prefetched``: whether one of them was started before it was needed
        - ``gathered_bytes`` and ``reduced_bytes``: of all these all-gathers and reductions, per rank
        - ``sharded_bytes``: the rank's part of the parameters, padding included
        - ``unsharded_bytes``: of the whole parameters
        - ``complete``: whether the step has ended

        A time lasts from a rank's call to the end (on a device: from when its stream begins it), waits for other ranks
        included. The exposed part is how long the rank waited for it. It is NaN where it is not known: for all-gathers
        with ``async_op`` on other CPU backends than gloo and shm, and on a device until it has ended the step.
        """
        return _frame(self.parameter_group_columns(model, last_steps))

    def gradients(self, model: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """Monitored gradients (`DistributedDataParallel.watch_gradients`): one row per step and bucket.

        Columns:

        - ``bucket``: -1 for all together
        - ``ranks``: number of ranks with gradients
        - ``before``: dict rank -> Euclidean norm of that rank's own gradients; ``before_mean``, ``before_min``,
          ``before_max``
        - ``after``: norm of the average
        - ``signal`` and ``noise``: estimates of the squared norm of the true gradient, and of the noise in a rank's.
          Averages over steps give the noise scale, see `noise_scale`
        - ``nonfinite`` ("NaN", "Inf" or ""), and where it was found first: ``nonfinite_rank``,
          ``nonfinite_parameter``
        - ``cost_ms``: the cost of monitoring the step on the first rank
        """
        return _frame(gradient_norm_columns(self.watched_gradients(model, last_steps)))

    def drift(self, model: int | None = None, last_steps: int | None = None) -> pd.DataFrame:
        """Comparisons of the ranks' replicas (`watch_drift`, `Cluster.check_drift`): one row per comparison.

        Columns:

        - ``step``: synchronised backwards before the comparison
        - ``ok``
        - ``first``: name of the first parameter or buffer that differs, "" for none
        - ``groups``: groups of ranks with equal values of it
        - ``differing``: how many tensors differ
        - ``tensors`` and ``bytes``: how much was compared
        - ``cost_ms``
        - ``error``: why the comparison failed, else ""

        Rank 0 of the model's group reports them. ``last_steps`` counts comparisons.
        """
        return _frame(drift_columns(self.drift_records(model, last_steps)))

    def noise_scale(self, model: int | None = None, last_steps: int = 100) -> float:
        """The gradient noise scale over monitored steps, in batches of a rank.

        It is the ratio of the noise in a rank's gradient to the squared norm of the true gradient, both estimated from
        the norms of single ranks and of their average (McCandlish et al. 2018, "An Empirical Model of Large-Batch
        Training", appendix A.1). Multiplied by a rank's batch size, it is the batch size up to which a larger batch
        still pays off. NaN if no step was monitored, or if the noise hides the gradient.
        """
        chosen = self.model(model)
        columns = gradient_norm_columns(self.watched_gradients(chosen.reducer if chosen else model, last_steps))
        together = columns["bucket"] == ALL_BUCKETS
        return noise_scale(columns["signal"][together], columns["noise"][together])

    def stragglers(
        self,
        model: int | None = None,
        last_steps: int = steady_steps.ANALYSED_STEPS,
        minimum_ms: float = 1.0,
        minimum_share: float = 0.25,
    ) -> list[LatePlace]:
        """Finds stragglers: the ranks whose own computation falls behind, and the bucket and parameter where it does.

        Accidental delays on a busy machine are ignored. A rank that the others wait for in most steps is also reported
        if its delay varies too much to name the place; see `LatePlace.where`.

        Args:
            minimum_ms: smaller delays count as noise.
            minimum_share: fraction of the steps in which a rank must be late at that place.

        Returns:
            The straggler locations, the most expensive first.
        """
        known = self.analysis_input(model, last_steps, minimum_ms=minimum_ms, minimum_share=minimum_share)
        return known.kind.late_places(known) if known is not None else []

    def findings(self, model: int | None = None, last_steps: int = steady_steps.ANALYSED_STEPS) -> list[Finding]:
        """Finds what to change: each finding has its evidence, a suggested fix and an estimated saving.

        Returns:
            The findings, the largest saving first.
        """
        return findings.findings(self.analysis_input(model, last_steps))

    analysis_input = steady_steps.analysis_input

    def parts(self, model: int | None = None, last_steps: int = steady_steps.PARTED_STEPS) -> StepParts:
        """Where the time of a step goes: its named parts by rank, and the program's lines behind the rest.

        Example:
            >>> for part, seconds in timeline.parts().mean.items():
            ...     print(f"{1e3 * seconds:.2f} ms {part}")
        """
        return steady_steps.parts(self, model, last_steps)

    # ---- what if ----------------------------------------------------------------------------------------

    def workload(self, model: int | None = None, last_steps: int = steady_steps.ANALYSED_STEPS) -> Workload:
        """The computation of one step and the readiness of its gradients: the input of the simulator.

        They are medians over ``last_steps``.

        Raises:
            ValueError: no two consecutive steps have been recorded with the current buckets.
        """
        return what_if.workload(self, model, last_steps=last_steps)

    def simulate(
        self,
        link: CommModel | None = None,
        *,
        model: int | None = None,
        without_rank: int | None = None,
        **what: Any,
    ) -> what_if.WhatIf[Timeline]:
        """Predicts the step with other buckets, hooks, world sizes or links.

        Args:
            link: the communication model of an all-reduce. None: fitted to the recorded collectives.
            without_rank: a rank that is assumed to be as fast as the others: "without the straggler".
            what: fields of `ddp_lab.simulation.simulator.Configuration`: ``bucket_cap_mb`` (None: as recorded),
                ``order``, ``hook``, ``sync_every``, ``world_size``, ``overlap``, ``jitter_ns``.

        Raises:
            ValueError: the model has no two consecutive steps, or no buckets (`fully_shard`); a value is not valid.

        Example:
            >>> timeline.simulate(bucket_cap_mb=5).step_ms
            >>> timeline.simulate(world_size=64, sync_every=4).timeline().figure()
        """
        return what_if.what_if(self, link, model=model, without_rank=without_rank, **what)

    def predicted_memory(
        self,
        model: int | None = None,
        *,
        groups: str | Sequence[str | Sequence[str]] | None = None,
        reshard_after_forward: bool = True,
        prefetch: int | None = None,
        world_size: int | None = None,
    ) -> pd.DataFrame:
        """Predicts the most bytes of tensors that a rank holds in a step under DDP, ZeRO-1 and `fully_shard`.

        The source is a step of a DDP model that `ddp_lab.measure_memory` has measured: activations and
        temporary tensors stay as they were, and what the strategy holds takes the place of what DDP held.

        One row for each ``strategy``: "ddp", "ddp, views" (``gradient_as_bucket_view``), "zero-1"
        (`ZeroRedundancyOptimizer`), "fully_shard". ``peak_bytes`` is the sum of the next columns, all at the moment of
        the peak: ``parameters_bytes`` (with the model's buffers), ``gradients_bytes``, ``buckets_bytes``,
        ``optimizer_bytes``, ``communication_bytes``, ``activations_bytes`` (with temporary tensors). ``where``: the
        part of the step.

        Args:
            model: which model; None for the most recently active one that was measured.
            groups: names of modules, as for `fully_shard`: ``"layers.*"`` makes a group of each module that it fits,
                ``("embedding", "head")`` one group of both; what is in none of them is the root's. None: each module
                named with a number, for example ``layers.3``.
            reshard_after_forward: as of `fully_shard`, for the groups; the root's parameters stay.
            prefetch: how many groups ahead parameters are gathered, in forward and backward; None (or True): as torch
                does by itself, one group ahead in the backward.
            world_size: as many ranks; None: as recorded.

        Raises:
            ValueError: no step was measured; a group names no module; the world size is below 1.

        Example:
            >>> timeline.predicted_memory(groups=["layers.*", "head"])[["strategy", "peak_bytes"]]
        """
        with self._lock:
            measured = {number: list(found.values()) for number, found in self._book.memory.items()}
        known = [one.reducer for one in self.reducers()] if model is None else [model]
        steps = memory.newest_measured(measured, known)
        sharding = memory.sharding_of(steps, groups, reshard_after_forward, prefetch)
        return _frame(memory.predicted_columns(steps, world_size, sharding))

    # ---- views ------------------------------------------------------------------------------------------

    def dashboard(self, *views: str) -> DOMWidget:
        """Returns a widget that shows this timeline, for example a recording. It needs no ranks and no torch.

        `Cluster.dashboard` shows a cluster's timeline, and has controls for its ranks.

        Args:
            views: names out of ``"timeline"``, ``"sync"``, ``"overlap"``, ``"parameter_groups"``, ``"stragglers"``,
                ``"buckets"``, ``"findings"``, ``"what_if"``, ``"gradients"`` and ``"groups"``; all if none is given.

        Example:
            >>> ddp_lab.Timeline.load("run.npz").dashboard()
        """
        return _above("dashboard.dashboard").of_recording(self, views)

    def replay(self, *views: str, speed: float = 1.0) -> DOMWidget:
        """Returns a dashboard that replays the recording as if it were live, with controls to pause and to go back.

        Its ``player`` does the same from code: ``play()``, ``pause()``, ``seek(seconds)``, ``speed``. Gaps of more
        than a second, for example between two cells, are replayed as one second.

        Args:
            views: as for `dashboard`.
            speed: seconds of the recording per second; 0.05 shows how each step grows.

        Raises:
            ValueError: the speed is not positive, nothing was recorded, or there is no such view.

        Example:
            >>> ddp_lab.Timeline.load("run.npz").replay(speed=0.1)
        """
        player = Player(self, speed=speed)
        return _above("dashboard.dashboard").of_recording(player.timeline, views, player)

    def what_if(self) -> DOMWidget:
        """Returns a widget that predicts the step for the settings of its sliders, beside the recorded step."""
        return self.dashboard("what_if")

    def report(self, path: str | os.PathLike[str], model: int | None = None, *, hangs: Sequence[str] = ()) -> Path:
        """Writes one HTML page that needs no network: findings and summary, then figures and tables.

        Args:
            path: the file to write.
            hangs: why ranks made no progress, in sentences that the page begins with.
        """
        target = Path(path)
        write_text(target, _above("dashboard.report").page(self, model, hangs=hangs))
        return target

    def figure(self, view: str = "timeline", *, model: int | None = None, **options: Any) -> Any:
        """A view as a plotly figure, for reports.

        Args:
            view: ``"timeline"`` (the spans of a step), ``"sync"``, ``"overlap"``, ``"stragglers"``, ``"buckets"``,
                ``"findings"``, ``"parameter_groups"``, ``"gradients"`` or ``"groups"`` (which shows no model).
            options: see `ddp_lab.dashboard.views.figure`.
        """
        return _above("dashboard.views").figure(self, view, model=model, **options)

    # ---- out --------------------------------------------------------------------------------------------

    def summary(self, model: int | None = None, last_steps: int = steady_steps.ANALYSED_STEPS) -> str:
        """A few sentences computed from the events: step time, communication, stragglers, findings, lost events."""
        return steady_steps.summary(self, model, last_steps) or self.group_summary() or words.NOTHING

    def group_summary(self) -> str:
        """A sentence for each process group: its operations, who was last in them, what has not ended; "" for none."""
        columns = self.collective_columns()
        found = collective_summary.group_facts(columns, self.groups())
        said = collective_summary.words(found, columns, self.forgotten_collectives())
        return "\n".join([*said, words.losses(sum(rank.dropped for rank in self.ranks()))] if said else [])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the raw events that are kept, and all descriptions, to an ``.npz`` file; `load` reads it.

        If there were more than ``max_events``, these are the newest ones, and a quarter as many of older, evenly spaced
        steps. `kept` of the loaded timeline reports what the file holds of a long run.
        """
        return archive.write(Path(path), self.events())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, partial: bool = False
    ) -> Timeline:
        """Reads a file of `save`, or merges the files of ranks.

        Args:
            path: a file of `save`; or files of ranks (of `ddp_lab.recording.save`, or journals of `ddp-lab run`), or a
                folder with such files: then they are merged, and the clocks of several hosts are aligned.
            partial: accept ranks without a file.

        If a journal is damaged, the parts before and after the damage are read, and a warning says what is missing.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is not a recording, or has another schema version; two files are of the same rank, or of
                different runs; a rank has no file.
        """
        made, damage = merge.read_path(path, cls, partial=partial)
        for sentence in damage:
            warnings.warn(sentence, stacklevel=2)
        return made

    def to_perfetto(self, path: str | os.PathLike[str], *, last_steps: int | None = None) -> Path:
        """Writes a Chrome trace (JSON) for ui.perfetto.dev: one process per rank, a track for each bucket and
        for each process group.

        Arrows lead from the gradient that completes a bucket to the rank's collective, and on to that of all ranks.
        With more than 250,000 gradients, only those that complete a bucket are included; with more than 100,000 arrows,
        only those of the rank that launched last. The trace says so in its ``otherData``.

        Args:
            path: the file to write; compressed if it ends in ``.gz``.
            last_steps: how many of the newest steps of each model; None for all that are kept.
        """
        return chrome_trace.write_file(Path(path), self._trace(last_steps))


def _above(module: str) -> Any:
    """A module that shows timelines: the only place where a package uses one above it, and only on a user's call."""
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
        notices: sentences for the reader of the timeline: which ranks are missing or failed, how the clocks were
            aligned, which files are damaged.
        damage: those of them about damaged or missing parts of the files.
        hangs: why ranks made no progress, in sentences, as the run reported them.
    """

    timeline: Timeline
    notices: tuple[str, ...]
    damage: tuple[str, ...] = ()
    hangs: tuple[str, ...] = ()


def read_run(paths: Sequence[str | os.PathLike[str]], *, partial: bool = False) -> RecordedRun:
    """Merges files that ranks wrote.

    Args:
        paths: files, or folders that hold them.
        partial: report ranks without a file in a notice instead of an error.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not a recording or has another schema version; two files are of the same rank, or of
            different runs; a rank of a model has no file.
    """
    return RecordedRun(*merge.read(paths, Timeline, partial=partial))
