"""Recorded events as one compressed ``.npz``, which numpy alone can read; nothing is pickled.

Beside it there is the journal: that one grows while a rank records, and survives its rank and its disk; this one is
written at once, a tenth as large. What is checked, and how, is the same.
"""

from __future__ import annotations

import json
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files import open_regular, replacing
from ..printable import printable_json, what_is_wrong
from . import descriptions
from .events import DTYPE, OF_GROUPS, SCHEMA_VERSION, Kind, check

MOST_BYTES = 8 << 30  # of a file's arrays, unpacked
_MOST_RATIO, _ANY_RATIO_BYTES = 100, 256 << 20  # packed once (events: 5 to 50 times); what may be unpacked in any case
_FEW = 1024
_WRITERS = "`lab.timeline.save(path)` writes one, and `ddp-lab run` a folder that can be read as well"
_NAMES = ("about", "chunk_rank", "chunk_size", "events")
# Exceptions of zipfile and numpy for invalid files.
_UNREADABLE = (
    *(ValueError, EOFError, OSError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError, OverflowError),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error, struct.error),
)


@dataclass(frozen=True)
class Archive:
    """What a file holds.

    Attributes:
        chunks: (rank, events) in the order of arrival.
        described: (rank, description) in the order of arrival.
        ranks: rank -> its dropped count and status.
    """

    chunks: list[tuple[int, npt.NDArray[np.void]]]
    described: list[tuple[int, dict[str, Any]]]
    ranks: dict[int, dict[str, Any]]


def write(path: Path, archive: Archive) -> Path:
    """Writes the file and returns its path."""
    about = {
        "described": archive.described,
        "ranks": {str(rank): about for rank, about in archive.ranks.items()},
        "schema_version": SCHEMA_VERSION,
    }
    with replacing(path) as file:
        np.savez_compressed(
            file,
            events=np.concatenate([np.empty(0, DTYPE), *(events for _, events in archive.chunks)]),
            chunk_rank=np.array([rank for rank, _ in archive.chunks], np.int64),
            chunk_size=np.array([len(events) for _, events in archive.chunks], np.int64),
            about=np.array(json.dumps(about)),
        )
    return path


def is_archive(path: Path) -> bool:
    """Whether a file was made by `write`, by the names of its contents.

    Raises:
        ValueError: it is not a file.
    """
    file = open_regular(path)
    try:
        with file, zipfile.ZipFile(file) as packed:
            return "about.npy" in packed.namelist()
    except OSError:
        raise
    except _UNREADABLE:
        return False


def read(path: Path) -> Archive:
    """Reads a file of `write`. Nothing in it is executed.

    Raises:
        ValueError: it is not such a file, has another schema version, or has invalid contents.
    """
    try:
        arrays = _arrays(path)
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not a saved timeline: {error or type(error).__name__}. {_WRITERS}") from error
    if "about" not in arrays:
        raise ValueError(f"{path} is not a saved timeline: it is a numpy file of something else. {_WRITERS}")
    try:
        about = json.loads(str(arrays["about"]))
        version = about["schema_version"]
        if version == SCHEMA_VERSION:
            return _archive(about, arrays)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a saved timeline: {what_is_wrong('it', error)}") from error
    raise ValueError(
        f"{path} holds events of schema version {version!r:.40}; this ddp_lab reads version {SCHEMA_VERSION}"
    )


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    with open_regular(path) as opened:
        with zipfile.ZipFile(opened) as packed:
            members = packed.infolist()
        size, unpacked = os.fstat(opened.fileno()).st_size, sum(one.file_size for one in members)
        if unpacked > min(MOST_BYTES, max(_ANY_RATIO_BYTES, _MOST_RATIO * size)):
            raise ValueError(f"{size:,} bytes would unpack to {unpacked:,}, more than any timeline")
        if any(one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for one in members):
            raise ValueError("its compression is not one that numpy uses")
        opened.seek(0)
        with np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name in _NAMES}


def _archive(about: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Archive:
    ranks = {_rank(int(rank)): _status(status) for rank, status in about["ranks"].items()}
    whose, sizes = _numbers(arrays, "chunk_rank"), _numbers(arrays, "chunk_size")
    events = _events(arrays)
    if len(whose) != len(sizes) or sum(sizes) != len(events) or not {*whose} <= ranks.keys():
        raise ValueError("its chunks do not match its events and ranks")
    parts = np.split(events, np.cumsum(sizes)[:-1]) if sizes else []
    described = [_description(rank, description, ranks) for rank, description in about["described"]]
    _check_buckets(events, [one for _, one in described])
    return Archive(chunks=list(zip(whose, parts, strict=True)), described=described, ranks=ranks)


def _events(arrays: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.void]:
    found = arrays["events"]
    if found.dtype != DTYPE or found.ndim != 1:
        raise ValueError("its events have another type")
    check(found, "it")
    # Tables are as wide as the largest bucket: numbers in a small file must not fill the memory.
    gradients = found["parameter"][found["kind"] == Kind.GRAD_READY]
    buckets = found["bucket"][found["kind"] < OF_GROUPS]  # else it is a rank
    widest = max(int(buckets.max(initial=-1)), int(gradients.max(initial=-1)))
    if widest >= max(_FEW, len(found)):
        raise ValueError(f"{len(found)} events name a bucket or parameter {widest}")
    return found


def _check_buckets(events: npt.NDArray[np.void], described: Sequence[dict[str, Any]]) -> None:
    """Checks that events only name buckets and parameters of their model's layouts."""
    of_model = (events["reducer"].astype(np.int64) << 16) + events["generation"]
    order = np.argsort(of_model, kind="stable")
    models, begins = np.unique(of_model[order], return_index=True)
    parameters = np.where(events["kind"] == Kind.GRAD_READY, events["parameter"], -1)
    widest = [np.maximum.reduceat(one[order], begins) if len(models) else one for one in (events["bucket"], parameters)]
    named = {model: (int(a), int(b)) for model, a, b in zip(models.tolist(), *widest, strict=True)}
    for one in described:
        if one.get("type") != "assignment":
            continue
        bucket, parameter = named.get((one["reducer"] << 16) + one["generation"], (-1, -1))
        if bucket >= len(one["buckets"]) or parameter >= len(one["parameters"]):
            raise ValueError(f"events of model {one['reducer']} name a bucket or parameter that it does not have")


def _numbers(arrays: dict[str, npt.NDArray[Any]], name: str) -> list[int]:
    found = arrays[name]
    if found.dtype != np.int64 or found.ndim != 1 or (found < 0).any():
        raise ValueError(f"{name!r} must hold integers ≥ 0")
    numbers: list[int] = found.tolist()
    return numbers


def _rank(number: object) -> int:
    if type(number) is not int or not 0 <= number < 1 << 31:
        raise ValueError(f"{number!r:.40} is not a rank")
    return number


def _status(about: Any) -> dict[str, Any]:
    descriptions.integer(0, 1 << 63)(about["dropped"], "dropped")
    if not isinstance(about["status"], dict):
        raise ValueError("the status of a rank is not valid")
    for name in ("state", "cell", "host", "torch", "script"):
        if about["status"].get(name) is not None:
            descriptions.text(about["status"][name], f"{name} of a rank")
    return {"dropped": about["dropped"], "status": printable_json(about["status"])}


def _description(rank: object, description: Any, ranks: Container[int]) -> tuple[int, dict[str, Any]]:
    if (number := _rank(rank)) not in ranks:
        raise ValueError(f"it describes rank {number}, but holds nothing else of it")
    return number, descriptions.checked(description)
