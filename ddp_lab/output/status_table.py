"""The ranks as a table, in text and HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

__all__ = ["cells_of", "html_table", "status_tables", "tables", "text_table"]

_COLUMNS = (
    "rank",
    "state",
    "device",
    "backend",
    "step",
    "cell",
    "in_flight",
    "pid",
    "host",
    "clock",
    "engine",
    "exit_code",
)


def status_tables(records: Sequence[Any]) -> tuple[str, str]:
    """Returns the table of `Cluster.status` as text and as HTML, without the columns that are empty."""
    found = [cells_of(record) for record in records]
    columns = [name for name in _COLUMNS if any(record.get(name) not in (None, "") for record in found)]
    rows = [["" if record.get(name) is None else str(record.get(name)) for name in columns] for record in found]
    return tables([name.replace("_", " ") for name in columns], rows)


def cells_of(record: Any) -> dict[str, Any]:
    """The fields of a rank's record, with the backend as one word if possible."""
    cells = {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}
    cells["state"] = getattr(record, "word", cells.get("state"))
    kinds = {part.partition(":")[2] for part in str(cells.get("backend", "")).split(",")}
    if len(kinds) == 1 and kinds != {""}:
        cells["backend"] = kinds.pop()  # cpu:gloo,cuda:gloo
    return cells


def tables(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Returns a table as text and as HTML."""
    return text_table(titles, rows), html_table(titles, rows)


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, as wide as necessary."""
    widths = [max(len(text) for text in column) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (titles, *rows)]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as HTML."""

    def line(tag: str, texts: Sequence[str]) -> str:
        cells = (f"<{tag} style='text-align:left'>{html.escape(text)}</{tag}>" for text in texts)
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', titles)}</thead><tbody>{body}</tbody></table>"
