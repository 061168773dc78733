"""A timeline as one HTML page: findings and summary, then figures and tables; it loads nothing from the network."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...diagnosis.crashes import Failure
from ...formatting import enumeration
from ...timeline.summary import CHANGE
from ...timeline.timeline import Timeline
from ..paint import scene_svg
from ..paint.palette import ROLE_RULES
from ..scene import Advice, Table
from ..views import SAVINGS, VIEWS, Reported, Selection
from .data import ReportData, gather

__all__ = ["page"]

_COLOURS = "".join(f"{selector}{{{rule}}}" for selector, rule in ROLE_RULES.items())
_STYLE = Path(__file__).with_name("report.css")
_LATEST = 1 << 62  # nanoseconds since 1970: later than any valid clock
_FEW_HOSTS = 4


def page(timeline: Timeline, reducer: int | None = None, last_steps: int = 400, hangs: Sequence[str] = ()) -> str:
    """Returns the page.

    Args:
        timeline: the recorded timeline.
        reducer: which model; None for the most recently active.
        last_steps: how many of its newest steps the picture of the run shows.
        hangs: why ranks made no progress, in sentences.
    """
    found = gather(timeline, reducer, last_steps)
    title = "Data-parallel training: " + (
        f"{found.module} on {_count(len(found.ranks), 'rank')}" if found else "report"
    )
    body = _body(timeline, found, title, hangs) if found else _without_model(timeline, hangs)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_COLOURS}\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _without_model(timeline: Timeline, hangs: Sequence[str]) -> str:
    """The process groups' operations, where no step of a model is complete."""
    shown = list(_shown_views(timeline))
    words = "".join(f"<p>{escape(line)}</p>" for line in timeline.summary().splitlines())
    title = "Collectives by group" if shown else "Nothing recorded"
    head = f"<header>\n<h1>{title}</h1>\n{_recorded(timeline)}</header>\n"
    told = f"{_failure(timeline.failure)}{_hangs(hangs)}"
    return f'{head}<main>\n{told}<div class="sheet words">{words}</div>\n{_figures(shown)}</main>\n'


def _body(timeline: Timeline, found: ReportData, title: str, hangs: Sequence[str]) -> str:
    shown = f"{_count(found.recorded_steps, 'step')} with this layout, numbers from {found.analysed}"
    others = f"; {_count(found.other_models, 'other model')} in the same program" if found.other_models else ""
    told, tiles = _failure(timeline.failure), _tiles(found.tiles)
    failed = timeline.failure is not None and bool(timeline.failure.ends)
    parts = [
        f"<header>\n<h1>{escape(title)}</h1>\n"
        f'{_recorded(timeline)}<p class="note">{shown}, '
        f"{_count(found.buckets, found.words.unit)} of {_count(found.parameters, 'parameter')}"
        f"{others}; ddp_lab {__version__}</p>\n{'' if told else tiles}</header>\n<main>\n",
        f"{told}{tiles}" if told else "",
        _hangs(hangs),
        ""
        if failed
        else '<section aria-labelledby="change"><h2 id="change">Findings</h2>\n'
        f"{_findings(found.findings, found.headline)}</section>\n",
        '<section aria-labelledby="words"><h2 id="words">Summary</h2>\n<div class="sheet words">'
        + "".join(f"<p>{escape(line)}</p>" for line in _words(timeline, found.reducer))
        + "</div></section>\n",
    ]
    parts.append(_figures(_shown_views(timeline, found)))
    for number, (heading, head, lines) in enumerate(found.tables):
        parts.append(
            f'<section aria-labelledby="t{number}"><h2 id="t{number}">{escape(heading)}</h2>\n'
            f'<div class="sheet tables">{_table(head, lines)}</div></section>\n'
        )
    return "".join([*parts, "</main>\n"])


def _shown_views(timeline: Timeline, found: ReportData | None = None) -> Iterator[Reported]:
    """Yields the views for which something was recorded; None: those that need no model."""
    chosen = Selection() if found is None else Selection(found.reducer, found.last_steps, step=found.drawn[0])
    for view in VIEWS.values():
        shown = view.reported(timeline, chosen) if found is not None or not view.model else None
        if shown is not None:
            yield shown


def _figures(shown: Iterable[Reported]) -> str:
    return "".join(
        f'<section aria-labelledby="f{number}"><h2 id="f{number}">{escape(one.title)}</h2>\n<div class="sheet">'
        f"{_figure(one)}</div></section>\n"
        for number, one in enumerate(shown)
    )


def _figure(shown: Reported) -> str:
    scene, note = shown.scene, '<p class="note">{}</p>'
    if scene.empty:
        return note.format(escape(scene.empty))
    picture = f'<figure class="{shown.style}">{scene_svg.picture(scene)}</figure>'
    return f"{note.format(escape(shown.caption))}{scene_svg.legend(scene)}{picture}{_twin(scene.table)}"


def _failure(failure: Failure | None) -> str:
    """Why the run failed, and how each rank ended, or what ranks called that does not fit; else nothing."""
    if failure is None:
        return ""
    cause = [] if failure.cause is None else failure.cause.brief.splitlines()
    lines = "".join(f"<p>{escape(line[:1].upper() + line[1:])}</p>" for line in [*cause, *failure.ends])
    heading = f'<section aria-labelledby="failure"><h2 id="failure">{failure.title}</h2>'
    return f'{heading}\n<div class="sheet words">{lines}</div></section>\n'


def _hangs(hangs: Sequence[str]) -> str:
    """Why ranks made no progress; nothing if they always did."""
    if not hangs:
        return ""
    lines = "".join(f"<p>{escape(line)}</p>" for line in hangs)
    heading = '<section aria-labelledby="hangs"><h2 id="hangs">Hangs</h2>'
    return f'{heading}\n<div class="sheet words">{lines}</div></section>\n'


def _recorded(timeline: Timeline) -> str:
    """When, where and with what the run was recorded, if the files contain it."""
    said = [one.status for one in timeline.ranks()]
    scripts, hosts, versions = (
        sorted({str(one[name]) for one in said if one.get(name)}) for name in ("script", "host", "torch")
    )
    began = [one["began_ns"] for one in said if isinstance(one.get("began_ns"), int) and 0 < one["began_ns"] < _LATEST]
    facts = [Path(script).name for script in scripts] + [f"torch {version}" for version in versions]
    when = time.strftime(" %Y-%m-%d %H:%M %Z", time.localtime(min(began) / 1e9)) if began else ""
    where = f" on {enumeration(hosts)}" if 0 < len(hosts) <= _FEW_HOSTS else f" on {len(hosts)} hosts" if hosts else ""
    if not (facts or when or where):
        return ""
    text = f"recorded{when}{where}{': ' if facts else ''}{', '.join(facts)}"
    return f'<p class="note">{escape(text)}</p>\n'


def _words(timeline: Timeline, reducer: int) -> list[str]:
    """The summary without the finding, which is above."""
    return [line for line in timeline.summary(reducer).splitlines() if not line.startswith(CHANGE)]


def _tiles(tiles: Sequence[tuple[str, str]]) -> str:
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles)
        + "</dl>\n"
    )


def _findings(found: Sequence[Advice], headline: str) -> str:
    if not found:
        return f'<div class="sheet"><p>{escape(headline)}</p></div>\n'
    items = "".join(
        f'<li class="{one.kind}"><div class="gain">{escape(one.saving)}<small>of the step</small></div>'
        f"<div><h3>{escape(one.title)}</h3><p>{escape(one.evidence)}</p>"
        f'<p class="remedy">{_with_code(one.remedy_parts)}</p></div></li>\n'
        for one in found
    )
    return f'<ol class="findings">\n{items}</ol>\n<p class="note">{escape(headline)} {SAVINGS}</p>\n'


def _with_code(parts: Sequence[str]) -> str:
    """Text and code in turn."""
    texts = (escape(part, quote=False) for part in parts)
    return "".join(f"<code>{text}</code>" if number % 2 else text for number, text in enumerate(texts))


def _twin(table: Table | None) -> str:
    if table is None:
        return ""
    numbers = _table(table.head, table.rows)
    return f'<details><summary>As a table</summary><div class="tables">{numbers}</div></details>'


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table; columns whose names end in a colon hold text, and rows that begin with spaces belong to one above."""
    classes = [' class="text"' if name.endswith(":") else "" for name in head]
    names = "".join(
        f'<th scope="col"{style}>{escape(name.rstrip(":"))}</th>' for name, style in zip(head, classes, strict=True)
    )
    body = "".join(
        ('<tr class="sub">' if str(line[0]).startswith(" ") else "<tr>")
        + "".join(f"<td{style}>{escape(_cell(value))}</td>" for value, style in zip(line, classes, strict=True))
        + "</tr>\n"
        for line in lines
    )
    return f"<table><thead><tr>{names}</tr></thead><tbody>\n{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if value != value else f"{value:.2f}"
    return str(value)
