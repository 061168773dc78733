"""Files with dumps of Flight Recorders: pickled, as NCCL's watchdog writes them, or JSON.

[Note: a pickle that is only read]
A pickle can make its reader call any function. These are read by an unpickler that builds numbers, texts, lists,
tuples, dictionaries and sets alone. One that names a class or a function is refused, and nothing of it is called.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...errors import DdpLabError
from ...machine import no_collector
from ..dumps import Dump

__all__ = ["read"]

_RANK = re.compile(r"(\d+)(?:\.[A-Za-z]+)*$")  # at the end of a name, as torch writes it
_MOST_BYTES = 1 << 30


class _RefusedError(pickle.UnpicklingError):
    """A pickle of something else than plain data."""


class _PlainData(pickle.Unpickler):
    """Builds plain data alone. See [Note: a pickle that is only read]."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _RefusedError(f"it names {module}.{name}, and dumps hold plain data alone")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _RefusedError("it refers to objects outside of the file")


def read(paths: Sequence[Path]) -> list[Dump]:
    """The dumps in these files and folders, one for each rank.

    Args:
        paths: of a folder every file in it that is a dump; others in it are left out.

    Raises:
        DdpLabError: a file can't be read, is not a dump, or its rank is unknown; or there is none.
    """
    found: dict[int, list[tuple[Mapping[str, Any], int]]] = {}
    with no_collector():
        for file, listed in (each for path in paths for each in _files(path)):
            parsed = _parsed(file, must=not listed)
            if parsed is not None:
                found.setdefault(_rank_of(file, parsed[0]), []).append(parsed)
    if not found:
        where = ", ".join(map(str, paths))
        raise DdpLabError(
            f"{where} holds no dump of a Flight Recorder; torch writes them to TORCH_NCCL_DEBUG_INFO_TEMP_FILE when a "
            "collective of NCCL times out, see https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
        )
    return [
        Dump(rank, tuple(dump for dump, _ in of_rank), max(at for _, at in of_rank))
        for rank, of_rank in sorted(found.items())
    ]


def _files(path: Path) -> Iterator[tuple[Path, bool]]:
    """A path's files, and whether they were only found in a folder."""
    if not path.is_dir():
        yield path, False
        return
    try:
        listed = sorted(path.iterdir())
    except OSError as error:
        raise DdpLabError(f"can't read {path}: {error.strerror}") from error
    for one in listed:
        if one.is_file() and _RANK.search(one.name):
            yield one, True


def _parsed(file: Path, *, must: bool) -> tuple[Mapping[str, Any], int] | None:
    """A file's dump, and when it was written (ns); None if it is none and need not be one."""
    try:
        with file.open("rb") as stream:
            about = os.fstat(stream.fileno())
            if about.st_size > _MOST_BYTES:
                raise ValueError("it is larger than 1 GiB")
            first = stream.peek(1)[:1]
            dump = json.load(stream) if first == b"{" else _PlainData(stream).load()
        if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list) or "version" not in dump:
            raise ValueError("it has no version and entries")
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not must:
            return None  # renamed since the folder was listed: it was not complete
        raise DdpLabError(f"can't read {file}: {error.strerror}") from error
    except Exception as error:  # bytes that are no pickle make pickle raise almost anything
        if must or isinstance(error, _RefusedError):
            raise DdpLabError(f"{file} is not a dump of torch's Flight Recorder: {error}") from error
        return None
    return dump, about.st_mtime_ns


def _rank_of(file: Path, dump: Mapping[str, Any]) -> int:
    given = dump.get("rank")
    if isinstance(given, int):
        return given
    found = _RANK.search(file.name)
    if found is None:
        raise DdpLabError(f"the rank of {file} is unknown: its name must end with the rank, for example dump_0")
    return int(found[1])
