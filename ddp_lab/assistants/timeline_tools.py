"""Tools that read a timeline: of a cluster while it trains, or of a recorded run.

The docstrings of a tool and of its arguments are what an assistant reads.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..analysis.findings import headline
from ..formatting import counted, enumeration, ms
from ..simulation.calibration import anchored, as_recorded
from ..simulation.link_model import CommModel
from ..simulation.simulator import Configuration, Prediction, simulate
from ..timeline.records import ReducerInfo
from ..timeline.timeline import Timeline, read_run
from ..timeline.what_if import fit_link
from . import answers
from .answers import Answer, Findings, Report, Summary

__all__ = ["Read", "Recording", "TimelineTools", "models_of"]

_Model = Annotated[int | None, Field(description="number of the model; null: the one that trained last")]


@dataclass(frozen=True)
class Read:
    """What a source of timelines gives.

    Attributes:
        timeline: the events.
        link: the measured communication model of an all-reduce; None: it is fitted to the recorded ones.
        notices: sentences on missing ranks and damaged files.
    """

    timeline: Timeline
    link: CommModel | None = None
    notices: tuple[str, ...] = ()


class Recording:
    """A recorded run, read when it is asked for, and again when its files have changed: the run may still grow.

    Args:
        path: a folder of `ddp-lab run`, or a file of `Timeline.save`.

    Raises:
        FileNotFoundError: there is nothing at this path.
        ValueError: it is not a recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()  # guards the two below: tools run on threads of their own
        self._stamp: Any = None
        self._read: Read | None = None
        self.read()

    def read(self) -> Read:
        """The timeline as the files are now."""
        with self._lock:
            files = sorted(self._path.iterdir()) if self._path.is_dir() else [self._path]
            stamp = [(file, found.st_mtime_ns, found.st_size) for file in files if (found := file.stat())]
            if self._read is None or stamp != self._stamp:
                run = read_run([self._path], partial=True)
                self._read, self._stamp = Read(run.timeline, None, run.notices), stamp
            return self._read


class TimelineTools:
    """Tools for a timeline.

    Args:
        read: gives it; may raise `DdpLabError`.
    """

    def __init__(self, read: Callable[[], Read]) -> None:
        self._read = read

    def all(self) -> list[Callable[..., Answer[Any]]]:
        """The tools."""
        return [self.timeline_summary, self.findings, self.what_if, self.report]

    def timeline_summary(self, model: _Model = None) -> Answer[Summary]:
        """Summarises a training from its recorded events.

        Says how long a step takes (median, in milliseconds), how much of the communication is overlapped with the
        backward computation, which bucket and which rank cost most, and how many events were lost. Lists all models.
        """
        read = self._read()
        chosen = read.timeline.model(_known(read.timeline, model))
        text, facts = read.timeline.summary(model), read.timeline.analysis_input(model)
        step_ms = None if facts is None else facts.step_ns / 1e6
        made = Summary(
            model=None if chosen is None else chosen.reducer,
            module="" if chosen is None else chosen.module,
            step_ms=_finite(step_ms),
            summary=text,
            models=models_of(read.timeline),
            notices=list(read.notices),
        )
        return Answer("\n".join([text, *read.notices, *_others(made.models, made.model)]), made)

    def findings(self, model: _Model = None) -> Answer[Findings]:
        """Finds what would make a training step faster.

        Each finding has its evidence, a suggested fix and an estimated saving in percent of the step, the largest
        first: bucket sizes, stragglers, unused parameters, options, communication.
        """
        timeline = self._read().timeline
        facts, found = timeline.analysis_input(_known(timeline, model)), timeline.findings(model)
        said = headline(facts, found)
        rows = [
            answers.Found(
                one.kind, one.title, one.evidence, one.remedy, one.gain_percent, one.rank, one.bucket, one.parameter
            )
            for one in found
        ]
        return Answer("\n".join([said, *(f"- {one}" for one in found)]), Findings(said, rows))

    def what_if(
        self,
        bucket_cap_mb: Annotated[
            float | None, Field(ge=0, description="bucket size limit in MiB; null: as recorded")
        ] = None,
        world_size: Annotated[int | None, Field(ge=2, description="number of ranks; null: as recorded")] = None,
        bandwidth_gb_s: Annotated[
            float | None,
            Field(gt=0, description="bandwidth of the network in 10^9 bytes per second; null: as recorded"),
        ] = None,
        latency_us: Annotated[
            float | None, Field(ge=0, description="latency of one message in microseconds; null: as recorded")
        ] = None,
        without_rank: Annotated[
            int | None, Field(ge=0, description="a rank that is assumed to be as fast as the others")
        ] = None,
        model: _Model = None,
    ) -> Answer[answers.Prediction]:
        """Predicts a training step with other buckets, another network or another number of ranks.

        A simulation of the recorded steps: nothing is run and nothing is changed. All times are in milliseconds;
        change_percent compares with a simulation of the recorded configuration.
        """
        read = self._read()
        info = read.timeline.model(_known(read.timeline, model))
        if info is None:
            raise ValueError("nothing was recorded: train some steps first")
        workload = read.timeline.workload(info.reducer)
        if workload.world_size < 2:
            raise ValueError("the model trains on a single rank: there is no communication to predict")
        if without_rank is not None and without_rank not in info.ranks:
            raise ValueError(f"without_rank={without_rank}: {info.module} trains on ranks {_listed(info.ranks)}")
        workload, link = anchored(workload, read.link or fit_link(read.timeline, info.reducer))
        recorded = as_recorded(workload) or Configuration()
        present = simulate(workload, recorded, link)
        if bandwidth_gb_s is not None:
            link = replace(link, ns_per_byte=1 / bandwidth_gb_s)
        if latency_us is not None:
            link = replace(link, latency_ns=1e3 * latency_us)
        if without_rank is not None:
            workload = workload.without(info.ranks.index(without_rank))
        cap = recorded.bucket_cap_mb if bucket_cap_mb is None else bucket_cap_mb
        predicted = simulate(workload, Configuration(cap, world_size=world_size), link)
        return _prediction(present, predicted, link, world_size or workload.world_size)

    def report(self, model: _Model = None) -> Answer[Report]:
        """Writes a report of the training as one HTML page that needs no network, and returns its path.

        The page is a new file in a private temporary folder; nothing else is written. Show the path to the user.
        """
        timeline = self._read().timeline
        _known(timeline, model)
        if not timeline.reducers():
            raise ValueError("there is nothing to report: no model has trained yet")
        page = Path(tempfile.mkdtemp(prefix="ddp_lab_report-")) / "report.html"
        timeline.report(page, model)
        return Answer(f"The report is {page}", Report(str(page)))


def models_of(timeline: Timeline) -> list[answers.Model]:
    """All models of a timeline."""
    return [
        answers.Model(one.reducer, one.module, list(one.ranks), one.last_step)
        for one in sorted(timeline.reducers(), key=lambda one: one.reducer)
    ]


def _known(timeline: Timeline, model: int | None) -> int | None:
    """Refuses the number of a model that there is not."""
    known = sorted(one.reducer for one in timeline.reducers())
    if model is not None and model not in known:
        raise ValueError(f"model={model}: there {_are(timeline.reducers()) if known else 'is no model yet'}")
    return model


def _are(models: Sequence[ReducerInfo]) -> str:
    names = [f"{one.reducer} ({one.module})" for one in sorted(models, key=lambda one: one.reducer)]
    return f"is only model {names[0]}" if len(names) == 1 else f"are models {enumeration(names)}"


def _others(models: Sequence[answers.Model], shown: int | None) -> list[str]:
    names = [f"{one.model} ({one.module})" for one in models if one.model != shown]
    return [f"Other models: {', '.join(names)}."] if names else []


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _prediction(
    present: Prediction, predicted: Prediction, link: CommModel, world_size: int
) -> Answer[answers.Prediction]:
    change = 100 * (predicted.step_ns / present.step_ns - 1)
    parts = {name: getattr(predicted, f"{name}_ns") / 1e6 for name in ("forward", "compute", "exposed", "other")}
    made = answers.Prediction(
        present_step_ms=present.step_ns / 1e6,
        step_ms=predicted.step_ns / 1e6,
        change_percent=change,
        hidden_ms=predicted.hidden_ns / 1e6,
        buckets=len(predicted.buckets),
        world_size=world_size,
        bandwidth_gb_s=_finite(link.bandwidth_gb_s),
        latency_us=link.latency_ns / 1e3,
        **{f"{name}_ms": value for name, value in parts.items()},
    )
    text = (
        f"Predicted step: {ms(made.step_ms)}, instead of {ms(made.present_step_ms)} ({change:+.1f} %); "
        f"{counted(world_size, 'rank')}, {counted(made.buckets, 'bucket')}. "
        f"Parts: {', '.join(f'{name} {ms(value)}' for name, value in parts.items())}; "
        f"overlapped communication {ms(made.hidden_ms)}."
    )
    return Answer(text, made)
