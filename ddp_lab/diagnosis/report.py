"""What the doctor found, in words for a terminal and as a table for a notebook."""

from __future__ import annotations

import html
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ..lesson_files import COPIED
from .rules import Diagnosis, diagnose
from .snapshot import RankSnapshot
from .sources import Source

__all__ = ["HangReport"]

_MOMENT_S = 0.1
_FRAMES, _LONGEST = 4, 140  # of each rank in the text: frames, and characters of one
_CODE = re.compile("`([^`]+)`")


@dataclass(frozen=True)
class HangReport:
    """What the doctor found; notebooks show it as a table below the sentence.

    Attributes:
        diagnosis: the cause and the suggested fix.
        ranks: what each rank does.
        processes: a line on each of the cluster's other processes that is stopped or was restarted.
    """

    diagnosis: Diagnosis
    ranks: tuple[RankSnapshot, ...]
    processes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, ranks: Sequence[RankSnapshot], before: Sequence[RankSnapshot] = (), processes: Sequence[str] = ()
    ) -> HangReport:
        """The report on these ranks and on what they did a moment before (see `diagnose`)."""
        return cls(diagnose(ranks, before), tuple(ranks), tuple(processes))

    @classmethod
    def collect(cls, source: Source, processes: Sequence[str] = (), seconds: float = 0.0) -> HangReport:
        """The report of one examination, or of two a moment apart if any rank waits.

        Args:
            source: of the ranks.
            processes: see `HangReport`.
            seconds: makes two examinations in any case, so far apart.

        Raises:
            DdpLabError: the ranks can't be examined, and why.
        """
        before = source.snapshots()
        if not seconds and not any(one.waits for one in before):
            return cls.of(before, (), processes)
        time.sleep(seconds or _MOMENT_S)
        return cls.of(source.snapshots(), before, processes)

    @property
    def brief(self) -> str:
        """The cause and the suggested fix."""
        return "\n".join([*self.processes, self.diagnosis.brief])

    @property
    def lesson(self) -> str:
        """The document that explains it, and the heading there; "" if nothing is wrong."""
        return self.diagnosis.lesson

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


def _since(one: RankSnapshot) -> str:
    return f" (in the {one.runs} for {one.seconds:.0f} s)" if one.seconds >= 1 else ""


def _frames(one: RankSnapshot) -> list[str]:
    """The user's own frames, the innermost last, as in a traceback."""
    return [f"{place} in {place.function}: {place.text}" for place in reversed(one.stack) if place.users]


def _innermost(frames: Sequence[str]) -> list[str]:
    """The last of these, and how many were omitted."""
    left = len(frames) - _FRAMES
    kept = [frame if len(frame) <= _LONGEST else frame[:_LONGEST] + "…" for frame in frames[-_FRAMES:]]
    return [*([f"… {left} more frame{'s' if left > 1 else ''}"] if left > 0 else ()), *kept]


def _stack(one: RankSnapshot) -> str:
    return "<br>".join(html.escape(line) for line in _frames(one)) or "–"
