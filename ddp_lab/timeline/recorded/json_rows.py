"""Millions of JSON objects that differ in numbers only, as text.

[Note: text of one width]
JSON allows blanks before a number. So all objects of a kind get one width: their text is a matrix of bytes whose rows
are copies of a template, and each number is written into its columns for all rows at once, four digits at a time from
a table. That takes a tenth of what formatting each object takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["JsonRows", "Number", "Sink"]

_Bytes = npt.NDArray[np.uint8]

_ROWS = 16_384  # written at once: they stay in the processor's cache


def _table() -> npt.NDArray[np.uint32]:
    """The text of 0 to 9999: with zeros in front, with blanks, and with blanks but the last digit."""
    made = [f"{number:04}" for number in range(10_000)]
    blank = [f"{number:4}" if number else "    " for number in range(10_000)]
    last = [f"{number:4}" for number in range(10_000)]
    return np.frombuffer("".join([*made, *blank, *last]).encode(), np.uint32)


_TABLE = _table()
_BLANK, _LAST = 10_000, 20_000
_THREE = np.frombuffer("".join(f"{number:03}" for number in range(1_000)).encode(), np.uint8).reshape(-1, 3)


class Sink(Protocol):
    """A file, or what compresses for one."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Takes bytes."""


@dataclass(frozen=True)
class Number:
    """A column of numbers.

    Attributes:
        values: integers, shape ``[rows]``.
        decimals: 0, 3 or 6: so many digits of each lie behind the point.
    """

    values: npt.NDArray[Any]
    decimals: int = 0


class JsonRows:
    """Writes the objects of one JSON array, separated by commas."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self._empty = True

    def texts(self, objects: Sequence[str]) -> None:
        """Writes objects that are text already."""
        if objects:
            self._file.write(("" if self._empty else ",\n").encode() + ",\n".join(objects).encode())
            self._empty = False

    def rows(self, parts: Sequence[str | Number]) -> None:
        """Writes one object for each row of the numbers.

        Args:
            parts: the text between the numbers, and the numbers: at least one of them, all of one length.
        """
        columns = [_Column.of(part) for part in parts if isinstance(part, Number)]
        count = len(columns[0].values)
        template, places, following = b",\n", [], iter(columns)
        for part in parts:
            if isinstance(part, Number):
                places.append(len(template))
                template += b" " * next(following).width
            else:
                template += part.encode()
        for begin in range(0, count, _ROWS):
            size = min(_ROWS, count - begin)
            block = np.empty((size, len(template)), np.uint8)
            block[:] = np.frombuffer(template, np.uint8)
            for column, place in zip(columns, places, strict=True):
                column.put(block, place, slice(begin, begin + size))
            if self._empty:
                block[0, :2] = ord(" ")
                self._empty = False
            self._file.write(block.data)


@dataclass(frozen=True)
class _Column:
    """Numbers of one width."""

    values: npt.NDArray[np.int64]
    decimals: int
    groups: int  # of four digits before the point
    negative: bool

    @classmethod
    def of(cls, number: Number) -> _Column:
        values = np.asarray(number.values).astype(np.int64)
        digits = len(str(int(np.abs(values).max(initial=0)) // 10**number.decimals))
        return cls(values, number.decimals, -(-digits // 4), bool((values < 0).any()))

    @property
    def width(self) -> int:
        return int(self.negative) + 4 * self.groups + (self.decimals + 1 if self.decimals else 0)

    def put(self, block: _Bytes, at: int, rows: slice) -> None:
        values = self.values[rows]
        if self.negative:  # seldom: a minus stands right before its digits
            texts = [f"{value / 10**self.decimals:{self.width}.{self.decimals}f}" for value in values.tolist()]
            written = np.frombuffer("".join(texts).encode(), np.uint8)
            block[:, at : at + self.width] = written.reshape(len(values), -1)
            return
        rest, fraction = np.divmod(values, 10**self.decimals)
        for group in reversed(range(self.groups)):
            rest, part = np.divmod(rest, 10_000)
            kind = np.where(rest > 0, 0, _LAST if group == self.groups - 1 else _BLANK)
            block[:, at + 4 * group : at + 4 * group + 4] = _TABLE[part + kind].view(np.uint8).reshape(-1, 4)
        if self.decimals:
            point = at + 4 * self.groups
            block[:, point] = ord(".")
            for place in range(point + self.decimals - 2, point, -3):
                fraction, part = np.divmod(fraction, 1_000)
                block[:, place : place + 3] = _THREE[part]
