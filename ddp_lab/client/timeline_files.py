"""A timeline on disk: raw events and descriptions in one ``.npz``, nothing pickled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..events import DTYPE, SCHEMA_VERSION

__all__ = ["Saved", "read", "write"]


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    Attributes:
        chunks: (rank, events) in the order of arrival.
        described: (rank, description) in the order of arrival.
        ranks: rank -> its dropped count and status.
    """

    chunks: list[tuple[int, npt.NDArray[np.void]]]
    described: list[tuple[int, dict[str, Any]]]
    ranks: dict[int, dict[str, Any]]


def write(path: Path, saved: Saved) -> Path:
    """Writes the file and returns its path."""
    about = {
        "described": saved.described,
        "ranks": {str(rank): about for rank, about in saved.ranks.items()},
        "schema_version": SCHEMA_VERSION,
    }
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            events=np.concatenate([np.empty(0, DTYPE), *(events for _, events in saved.chunks)]),
            chunk_rank=np.array([rank for rank, _ in saved.chunks], np.int64),
            chunk_size=np.array([len(events) for _, events in saved.chunks], np.int64),
            about=np.array(json.dumps(about)),
        )
    return path


def read(path: Path) -> Saved:
    """Reads what `write`, or on one rank `ddp_lab.recording.save`, wrote.

    Raises:
        ValueError: it is no such file, or of another schema version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is not a saved timeline: {error}") from error
    if "about" in arrays:
        return _timeline(path, arrays)
    if "descriptions" in arrays:
        return _recording(path, arrays)
    raise ValueError(f"{path} is not a saved timeline: it holds {sorted(arrays)}")


def _timeline(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> Saved:
    about = json.loads(str(arrays["about"]))
    _check(path, about["schema_version"])
    parts = np.split(arrays["events"], np.cumsum(arrays["chunk_size"])[:-1]) if len(arrays["chunk_size"]) else []
    return Saved(
        chunks=list(zip(arrays["chunk_rank"].tolist(), parts, strict=True)),
        described=[(rank, description) for rank, description in about["described"]],
        ranks={int(rank): status for rank, status in about["ranks"].items()},
    )


def _recording(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> Saved:
    _check(path, int(arrays["schema_version"]))
    rank = int(arrays["rank"])
    return Saved(
        chunks=[(rank, arrays["events"])],
        described=[(rank, description) for description in json.loads(str(arrays["descriptions"]))],
        ranks={rank: {"dropped": int(arrays["dropped"]), "status": {}}},
    )


def _check(path: Path, version: int) -> None:
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path} holds events of schema version {version}, this ddp_lab reads {SCHEMA_VERSION}")
