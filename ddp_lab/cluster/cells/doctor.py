"""The doctor: examines all ranks, diagnoses why they make no progress, and watches running cells for hangs.

The ranks answer with `ddp_lab.engine.status.examine`; [Note: who waits for whom] in `ddp_lab.diagnostics.hangs` says
what follows from that. Ranks are not stopped for it; one that does not answer within a second is called silent.
"""

from __future__ import annotations

import html
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...diagnostics.calls import Diagnosis, diagnose_ahead, hang_lesson
from ...diagnostics.flights import Distance, Distances
from ...diagnostics.hangs import diagnose, different_calls
from ...diagnostics.rank_state import Examined
from ...errors import DdpLabError
from ...lesson_files import COPIED

_SURE_SECONDS = 2.0  # a rank waits for one that was not sent the cell: only another cell changes that
_MOMENT_S = 0.1
_LOOKS = 4  # examinations within the time after which a cell without progress is reported
_FRAMES, _LONGEST = 4, 140  # of each rank in the text: frames, and characters of one
_CODE = re.compile("`([^`]+)`")
_APART = 0.7  # of that time: what is found then is reported within it


@dataclass(frozen=True)
class HangReport:
    """What the doctor found; notebooks show it as a table below the sentence.

    Attributes:
        diagnosis: the cause and the suggested fix.
        ranks: what each rank does.
        processes: a line on each of the cluster's other processes that is stopped or was restarted.
    """

    diagnosis: Diagnosis
    ranks: tuple[Examined, ...]
    processes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, ranks: Sequence[Examined], before: Sequence[Examined] = (), processes: Sequence[str] = ()
    ) -> HangReport:
        """The report on these ranks and on what they did a moment before (see `diagnose`)."""
        return cls(diagnose(ranks, before), tuple(ranks), tuple(processes))

    @classmethod
    def made(cls, examine: Callable[[], Sequence[Examined]], processes: Sequence[str] = ()) -> HangReport:
        """The report of one examination, or of two a moment apart if any rank waits."""
        before = examine()
        if not any(one.waits for one in before):
            return cls.of(before, (), processes)
        time.sleep(_MOMENT_S)
        return cls.of(examine(), before, processes)

    @property
    def brief(self) -> str:
        """The cause and the suggested fix."""
        return "\n".join([*self.processes, brief(self.diagnosis)])

    @property
    def lesson(self) -> str:
        """The document that explains it, and the heading there; "" if nothing is wrong."""
        return hang_lesson(self.diagnosis.kind)

    def __str__(self) -> str:
        lines = [self.brief]
        shown: dict[tuple[str, ...], int] = {}  # stack -> the first rank that has it
        for one in self.ranks:
            lines.append(f"  rank {one.rank} {one}{_since(one)}")
            if one.in_flight:
                lines.append(f"    in flight: {one.in_flight}")
            frames = tuple(_frames(one))
            first = shown.setdefault(frames, one.rank)
            if first != one.rank and frames:
                lines.append(f"      its stack: same as rank {first}")
            else:
                lines += [f"      {frame}" for frame in _innermost(frames)]
        if self.lesson:
            lines.append(f"  More: {self.lesson}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cell(text: str, tag: str = "td") -> str:
            return f"<{tag} style='text-align:left;vertical-align:top'>{html.escape(text)}</{tag}>"

        rows = "".join(
            f"<tr>{cell(str(one.rank), 'th')}{cell(str(one) + _since(one))}{cell(one.in_flight or '–')}"
            f"<td style='text-align:left'>{_stack(one)}</td></tr>"
            for one in self.ranks
        )
        remedy = f"<br>→ {_with_code(self.diagnosis.remedy)}" if self.diagnosis.remedy else ""
        titles = ("rank", "what it does", "in flight", "its stack")
        head = f"<tr>{''.join(cell(title, 'th') for title in titles)}</tr>"
        more = f"<p><small>More: {_link(self.lesson)}</small></p>" if self.lesson else ""
        others = "".join(f"<p>{_with_code(line)}</p>" for line in self.processes)
        sentence = _with_code(self.diagnosis.sentence)
        return f"{others}<p><b>{sentence}</b>{remedy}</p><table>{head}{rows}</table>{more}"


def brief(diagnosis: Diagnosis) -> str:
    """The cause and the suggested fix."""
    return f"{diagnosis.sentence}\n→ {diagnosis.remedy}" if diagnosis.remedy else diagnosis.sentence


def _with_code(text: str) -> str:
    """Escapes a text and renders what is in backticks as code."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def _link(lesson: str) -> str:
    """A lesson as a link that a notebook follows, if it is in this folder or one above; else its name."""
    document, _, heading = lesson.partition(", ")
    here = Path.cwd()
    for above in (here, *here.parents):
        for home in (above, above / COPIED):
            if (home / document).is_file():
                path = Path(os.path.relpath(home / document, here)).as_posix()
                target = f"{quote(path)}#{quote(heading.strip(chr(34)).replace(' ', '-'))}"
                return f'<a href="{target}">{html.escape(lesson)}</a>'
    return html.escape(lesson)


def _since(one: Examined) -> str:
    return f" (in the {one.runs} for {one.seconds:.0f} s)" if one.seconds >= 1 else ""


def _frames(one: Examined) -> list[str]:
    """The user's own frames, the innermost last, as in a traceback."""
    return [f"{place} in {place.function}: {place.text}" for place in reversed(one.stack) if place.users]


def _innermost(frames: Sequence[str]) -> list[str]:
    """The last of these, and how many were omitted."""
    left = len(frames) - _FRAMES
    kept = [frame if len(frame) <= _LONGEST else frame[:_LONGEST] + "…" for frame in frames[-_FRAMES:]]
    return [*([f"… {left} more frame{'s' if left > 1 else ''}"] if left > 0 else ()), *kept]


def _stack(one: Examined) -> str:
    return "<br>".join(html.escape(line) for line in _frames(one)) or "–"


class Watch:
    """Notices that a running cell makes no progress, or that its ranks fall out of step, and reports it once.

    `look` is called by the thread that shows the cell's outputs; examinations run on threads of their own.

    Args:
        examine: examines all ranks; may raise `DdpLabError`.
        seconds: time without progress after which the cell is reported.
        partial: whether the cell runs on some ranks only; that they wait for others is then reported sooner.
    """

    def __init__(self, examine: Callable[[], Sequence[Examined]], seconds: float, partial: bool = False) -> None:
        self._examine, self._seconds = examine, seconds
        self._lock = threading.Lock()  # guards what the examining thread leaves
        self._found: tuple[Sequence[Examined], float] | None = None
        self._thread: threading.Thread | None = None
        self._sure = min(seconds, _SURE_SECONDS) if partial else seconds
        self._next = time.monotonic() + self._sure / _LOOKS
        self._seen: Any = None
        self._same_since = time.monotonic()
        self._distances = Distances(seconds * _APART)
        self._outputs: Any = None
        self._told = False

    def look(self, outputs: object) -> str | None:
        """Returns what to report, once in the life of a cell; else None.

        Args:
            outputs: a value that changes with every output, which counts as progress.
        """
        now = time.monotonic()
        if self._told:
            return None
        if outputs != self._outputs:
            self._outputs, self._same_since = outputs, now
        with self._lock:
            found, self._found = self._found, None
        told = self._judge(*found) if found is not None else None
        if told is not None:
            self._told = True
            what, diagnosis = told
            lesson = hang_lesson(diagnosis.kind)
            more = f"; {lesson} explains it" if lesson else ""
            return f"{what}: {brief(diagnosis)}\n  `%cluster doctor` shows every rank{more}."
        if now >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = now + self._sure / _LOOKS
            self._thread = threading.Thread(target=self._work, name="ddp_lab-doctor", daemon=True)
            self._thread.start()
        return None

    def _judge(self, ranks: Sequence[Examined], at: float) -> tuple[str, Diagnosis] | None:
        """What is certainly wrong: calls that differ, ranks that are out of step, ranks that wait too long."""
        if any(one.debugged for one in ranks):  # the user knows, and its peers may wait for as long as that takes
            self._seen, self._same_since, self._distances = None, at, Distances(self._seconds * _APART)
            return None
        flights = {one.rank: one.flights for one in ranks}
        apart = self._distances.add(at, flights, [one.rank for one in ranks if one.state != "running"])
        different = different_calls(ranks, [one for one in ranks if one.waits])
        if different is not None:
            return "the ranks make different calls", different
        if apart is not None and not _waits_for_an_end(ranks, apart):
            calls = "collective" if apart.gap == 1 else "collectives"
            return f"the ranks are out of step, by {apart.gap} {calls}", diagnose_ahead(ranks, apart)
        seen = _fingerprint(ranks)
        if seen != self._seen:
            self._seen, self._same_since = seen, max(self._same_since, at)
            return None
        waited = at - self._same_since
        if waited < self._sure:
            return None
        diagnosis = diagnose(ranks)
        if diagnosis.stuck and (diagnosis.kind == "subset" or waited >= self._seconds):
            return f"no progress for {waited:.0f} s", diagnosis
        return None

    def _work(self) -> None:
        at = time.monotonic()
        try:
            ranks = self._examine()
        except DdpLabError:  # the cluster is being stopped, which the cell itself reports
            return
        with self._lock:
            self._found = (ranks, at)


def _waits_for_an_end(ranks: Sequence[Examined], apart: Distance) -> bool:
    """Whether the rank ahead waits for one whose cell has ended: `diagnose` explains that better."""
    by_rank = {one.rank: one for one in ranks}
    return by_rank[apart.ahead].waits and by_rank[apart.behind].state != "running"


def _fingerprint(ranks: Sequence[Examined]) -> Any:
    """Changes when a rank makes progress."""
    return [(one.rank, one.state, one.place, one.call, sorted(one.sequences.items()), one.models) for one in ranks]
