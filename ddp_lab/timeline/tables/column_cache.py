"""Columns of spans, steps and gradient sync that are computed once, by blocks of steps.

[Note: what was digested]
A step that has ended does not change any more, but a live view asks for all of them again and again. So columns are
computed for blocks of 32 step numbers and kept with the block's fingerprint: how many steps it holds, the newest
revision among them (`StepTable.revisions`), and what is known of the step before. Where the fingerprint is another
one, the block is computed again: the newest one, and the one whose steps are being forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import span_columns
from .span_columns import SPAN_COLUMNS, SYNC_COLUMNS, Columns, TableView
from .step_table import StepTable

__all__ = ["ColumnCache", "Part"]

_BLOCK = 32
_Fingerprint = tuple[Any, ...]


@dataclass(frozen=True)
class Part:
    """Columns of one block of one rank's steps."""

    reducer: int
    rank: int
    block: int
    fingerprint: _Fingerprint
    columns: Columns


class ColumnCache:
    """What was computed from step tables; any thread may ask. It takes the tables' lock only to copy what is new."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, int, int, int], Part] = {}
        self._sync: dict[tuple[int, int], tuple[_Fingerprint, Columns]] = {}

    def parts(
        self,
        kind: str,
        tables: Mapping[tuple[int, int], StepTable],
        lock: AbstractContextManager[Any],
        first: Mapping[int, int | None],
        make: Callable[[TableView], Columns],
    ) -> list[Part]:
        """All blocks, by reducer, rank and step.

        Args:
            kind: what `make` makes.
            tables: (reducer, rank) -> table; appended to under `lock`.
            lock: of the tables.
            first: reducer -> the first step that is wanted, None for all; reducers that are not wanted are not in it.
            make: computes columns, ``"step"`` among them.
        """
        with self._lock:
            made: list[Part] = []
            stale: list[tuple[int, int, int, _Fingerprint, TableView]] = []
            held: set[tuple[int, int, int]] = set()
            with lock:
                wanted = [(of, rank) for of, rank in sorted(tables) if of in first]
                for of, rank in wanted:
                    table, begin = tables[of, rank], first[of]
                    for block, fingerprint in _blocks(table):
                        held.add((of, rank, block))
                        if begin is not None and block < begin // _BLOCK:
                            continue
                        known = self._parts.get((kind, of, rank, block))
                        if known is None or known.fingerprint != fingerprint:
                            view = span_columns.view(
                                rank, of, table, first=block * _BLOCK, last=(block + 1) * _BLOCK - 1
                            )
                            stale.append((of, rank, block, fingerprint, view))
                        else:
                            made.append(known)
            for of, rank, block, fingerprint, view in stale:
                part = Part(of, rank, block, fingerprint, make(view))
                self._parts[kind, of, rank, block] = part
                made.append(part)
            made.sort(key=lambda one: (one.reducer, one.rank, one.block))
            self._forget(kind, set(first), held)
        return [_since(part, first[part.reducer]) for part in made]

    def sync(self, spans: Sequence[Part], ranks_of: Mapping[int, int]) -> Columns:
        """Columns of `Timeline.sync` from the parts of its spans.

        Args:
            spans: what `parts` returned for spans.
            ranks_of: reducer -> how many ranks it has.
        """
        by_block: dict[tuple[int, int], list[Part]] = {}
        for part in spans:
            by_block.setdefault((part.reducer, part.block), []).append(part)
        made = []
        with self._lock:
            for (of, block), parts in sorted(by_block.items()):
                fingerprint = (ranks_of[of], *((one.rank, len(one.columns["step"]), one.fingerprint) for one in parts))
                known = self._sync.get((of, block))
                if known is None or known[0] != fingerprint:
                    together = joined([one.columns for one in parts], SPAN_COLUMNS)
                    known = fingerprint, span_columns.sync_columns(together, {of: ranks_of[of]})
                    self._sync[of, block] = known
                made.append(known[1])
        return joined([one for one in made if len(one["step"])], SYNC_COLUMNS)

    def _forget(self, kind: str, asked: Set[int], held: Set[tuple[int, int, int]]) -> None:
        """Forgets blocks whose steps the tables no longer hold, of the reducers that were asked for."""
        gone = [key for key in self._parts if key[0] == kind and key[1] in asked and key[1:] not in held]
        for key in gone:
            del self._parts[key]
        there = {(of, block) for of, _, block in held}
        for of, block in [key for key in self._sync if key[0] in asked and key not in there]:
            del self._sync[of, block]


def joined(parts: Sequence[Columns], names: Sequence[str]) -> Columns:
    """One array for each column."""
    return {name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0) for name in names}


def _blocks(table: StepTable) -> Iterator[tuple[int, _Fingerprint]]:
    """Numbers and fingerprints of the blocks that hold steps."""
    rows = table.rows()
    number = table.step[rows] // _BLOCK
    begins = np.flatnonzero(np.diff(number, prepend=-1))
    revisions = table.revisions[rows]
    newest = np.maximum.reduceat(revisions, begins) if len(begins) else revisions
    ends = span_columns.previous_ends(table, rows)
    for begin, end, revision in zip(begins, [*begins[1:], len(rows)], newest.tolist(), strict=True):
        yield int(number[begin]), (int(end - begin), revision, int(ends[begin]))


def _since(part: Part, first: int | None) -> Part:
    """The part without the steps before `first`."""
    if first is None or part.block * _BLOCK >= first:
        return part
    shown: npt.NDArray[np.bool_] = part.columns["step"] >= first
    columns = {name: values[shown] for name, values in part.columns.items()}
    return Part(part.reducer, part.rank, part.block, part.fingerprint, columns)
