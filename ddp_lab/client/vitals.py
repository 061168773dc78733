"""How ranks are: what they say of themselves, and since when they have been silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..insight.flights import in_flight_words

if TYPE_CHECKING:
    from .membership import RankRecord

__all__ = ["RankVitals"]


@dataclass(frozen=True)
class RankVitals:
    """How one rank is.

    Attributes:
        record: its place and state.
        label: name of the cell that it runs; None between cells, or if it does not answer.
        cell_seconds: how long it has run that cell.
        silent_seconds: since it last sent anything; None if it never did.
        in_flight: collectives that it has launched and that have not ended, in words; "" if there is none.
        gpu_used: bytes that all processes use of its GPU; None without GPU, or if the driver does not tell.
        gpu_total: bytes that its GPU has.
        gpu_percent: of the time in which its GPU was busy, in about the last second.
    """

    record: RankRecord
    label: str | None = None
    cell_seconds: float | None = None
    silent_seconds: float | None = None
    in_flight: str = ""
    gpu_used: int | None = None
    gpu_total: int | None = None
    gpu_percent: int | None = None

    @classmethod
    def of(cls, record: RankRecord, answer: Mapping[str, Any], silent_seconds: float | None) -> RankVitals:
        """From what the rank answered; empty: it did not."""
        gpu = answer.get("gpu") or {}
        return cls(
            record,
            answer.get("label"),
            answer.get("seconds"),
            silent_seconds,
            in_flight_words(answer.get("in_flight") or {}),
            gpu.get("used"),
            gpu.get("total"),
            gpu.get("percent"),
        )
