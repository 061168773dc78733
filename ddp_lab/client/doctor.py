"""The doctor: examines all ranks, says why they do not come on, and watches running cells for it.

What the ranks answer is `ddp_lab.engine.examine`, what follows from it [Note: who waits for whom] in
`ddp_lab.insight.hangs`. A rank is not stopped for it; one that does not answer within a second is said to be silent.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DdpLabError
from ..insight.examined import Examined
from ..insight.hangs import Diagnosis, diagnose

__all__ = ["Report", "Watch"]

_SURE_SECONDS = 2.0  # a rank waits for one that was not given the cell: nothing but another cell changes that
_LOOKS = 4  # examinations within the time after which a cell without progress is told of


@dataclass(frozen=True)
class Report:
    """What the doctor found; notebooks show it as a table below the sentence.

    Attributes:
        diagnosis: the reason, and what to do.
        ranks: what each rank does.
    """

    diagnosis: Diagnosis
    ranks: tuple[Examined, ...]

    @classmethod
    def of(cls, ranks: Sequence[Examined]) -> Report:
        """The report on these ranks."""
        return cls(diagnose(ranks), tuple(ranks))

    @property
    def brief(self) -> str:
        """The reason, and what to do."""
        remedy = f"\n→ {self.diagnosis.remedy}" if self.diagnosis.remedy else ""
        return f"{self.diagnosis.sentence}{remedy}"

    def __str__(self) -> str:
        lines = [self.brief]
        for one in self.ranks:
            lines.append(f"  rank {one.rank} {one}{_since(one)}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cell(text: str, tag: str = "td") -> str:
            return f"<{tag} style='text-align:left;vertical-align:top'>{html.escape(text)}</{tag}>"

        rows = "".join(
            f"<tr>{cell(str(one.rank), 'th')}{cell(str(one) + _since(one))}"
            f"<td style='text-align:left'>{_stack(one)}</td></tr>"
            for one in self.ranks
        )
        remedy = f"<br>→ {html.escape(self.diagnosis.remedy)}" if self.diagnosis.remedy else ""
        head = f"<tr>{cell('rank', 'th')}{cell('what it does', 'th')}{cell('its stack', 'th')}</tr>"
        return f"<p><b>{html.escape(self.diagnosis.sentence)}</b>{remedy}</p><table>{head}{rows}</table>"


def _since(one: Examined) -> str:
    return f" (in the cell for {one.seconds:.0f} s)" if one.seconds >= 1 else ""


def _stack(one: Examined) -> str:
    """The user's own frames, the innermost last, as in a traceback."""
    lines = [f"{place} in {place.function}: {place.text}" for place in reversed(one.stack) if place.users]
    return "<br>".join(html.escape(line) for line in lines) or "–"


class Watch:
    """Notices that a running cell makes no progress, and says so once.

    `look` is called by the thread that shows the cell's outputs; examinations run on threads of their own.

    Args:
        examine: examines all ranks; may raise `DdpLabError`.
        seconds: without progress, after which the cell is told of.
        partial: the cell runs on some ranks only: that they wait for others is told sooner.
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
        self._outputs: Any = None
        self._told = False

    def look(self, outputs: object) -> str | None:
        """Returns what is to be told, once in the life of a cell; else None.

        Args:
            outputs: another value whenever outputs have come: then there is progress.
        """
        now = time.monotonic()
        if self._told:
            return None
        if outputs != self._outputs:
            self._outputs, self._same_since = outputs, now
        with self._lock:
            found, self._found = self._found, None
        if found is not None:
            ranks, at = found
            seen = _fingerprint(ranks)
            if seen != self._seen:
                self._seen, self._same_since = seen, max(self._same_since, at)
            elif at - self._same_since >= self._sure:
                report = Report.of(ranks)
                sure = report.diagnosis.kind == "subset" or at - self._same_since >= self._seconds
                if report.diagnosis.stuck and sure:
                    self._told = True
                    seconds = at - self._same_since
                    return f"no progress for {seconds:.0f} s: {report.brief}\n  `%cluster doctor` shows every rank."
        if now >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = now + self._sure / _LOOKS
            self._thread = threading.Thread(target=self._work, name="ddp_lab-doctor", daemon=True)
            self._thread.start()
        return None

    def _work(self) -> None:
        at = time.monotonic()
        try:
            ranks = self._examine()
        except DdpLabError:  # the cluster is being stopped: whoever runs the cell is told by that
            return
        with self._lock:
            self._found = (ranks, at)


def _fingerprint(ranks: Sequence[Examined]) -> Any:
    """Changes when a rank comes on."""
    return [(one.rank, one.state, one.place, one.call, sorted(one.sequences.items()), one.models) for one in ranks]
