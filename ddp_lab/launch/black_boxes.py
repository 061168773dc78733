"""The last events of ranks that died, for their journals: see [Note: what a dead rank leaves].

The process of torch's agent makes a file in memory for each rank of this host. A rank opens its own through /proc and
records into it. When the run has ended, what a journal lacks is appended to it. A rank that torch's agent has started
again does that for its predecessor, before it uses the file itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..command_line import tell
from ..protocol import black_box, events, journal
from ..protocol.black_box import BlackBox, description_key, with_ranks_of_groups
from ..protocol.journal import BEFORE_ITS_END, ENDED_WITH_RUN, EXITED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from ..timeline.recorded.journal_messages import Opening

__all__ = ["BlackBoxes", "leave_in"]

_How = Callable[["Opening"], str]  # how the process of a journal ended that does not say it


class BlackBoxes:
    """Files in memory, one for each rank of this host.

    Attributes:
        option: what a rank is told about them.
        exited: process ids of ranks that have exited by themselves, with code 0.
    """

    def __init__(self, ranks: int) -> None:
        self._files = [os.memfd_create(f"ddp_lab-rank{number}") for number in range(ranks)]
        self.option = ",".join(map(str, self._files))
        self.exited: set[int] = set()
        self._how: _How | None = None  # None: not known

    def note(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Takes what torch's agent says of the ranks that failed; it has ended the others, with SIGTERM."""
        first = min(failures, key=lambda rank: failures[rank].timestamp, default=-1)
        killed = {rank: one.signal_name() for rank, one in failures.items() if one.exitcode < 0}
        killed = {rank: name for rank, name in killed.items() if name != "SIGTERM" or rank == first}
        exits = {rank: one.exitcode for rank, one in failures.items() if one.exitcode > 0}
        ends = {rank: f"exit code {code} {BEFORE_ITS_END}" for rank, code in exits.items()}
        ends |= {rank: f"killed by {name}" for rank, name in killed.items()}
        self._how = lambda one: EXITED if one.pid in self.exited else ends.get(one.rank, ENDED_WITH_RUN)

    def complete(self, folder: Path) -> None:
        """Appends to the journals in a folder what they lack: the last events, and how the process ended."""
        for file in self._files:
            _complete(folder, file, self._how)

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def leave_in(agent: int, option: str, folder: Path) -> None:
    """Lets this rank leave what it records; call it before anything is recorded.

    Args:
        agent: process id of who made the files.
        option: of `BlackBoxes`.
        folder: that of the run.
    """
    from .. import native

    number = option.split(",")[int(os.environ.get("LOCAL_RANK", 0))]
    try:
        file = os.open(f"/proc/{agent}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        tell(f"if this rank is killed, its last events are lost: can't open its file in memory: {error.strerror}")
        return
    try:
        _complete(folder, file, None)
        native.load().leave_in(file)
    except OSError as error:
        tell(f"if this rank is killed, its last events are lost: {error.strerror}")
    finally:
        os.close(file)


def _complete(folder: Path, file: int, how: _How | None) -> None:
    left = black_box.read(file)
    if left is None:
        return
    for path in folder.glob(f"*{journal.SUFFIX}"):
        try:
            _append_to(path, left, how)
        except (OSError, ValueError) as error:
            tell(f"{path} lacks the last events of its rank: {error}")


def _append_to(path: Path, left: BlackBox, how: _How | None) -> None:
    """Appends what a journal lacks, if it is that of this process and does not say how the program ended."""
    from ..timeline.recorded.journal_messages import Decoder, End, Opening

    decoder = Decoder(path)
    said = decoder.read()
    opening = next((one for one in said if isinstance(one, Opening)), None)
    if opening is None or (opening.pid, opening.host) != (left.pid, socket.gethostname()):
        return
    rest = list(said)
    if opening.end is not None or any(isinstance(one, End) for one in rest):
        return
    if damage := decoder.notices():
        raise ValueError(damage[0])
    batches = [one for one in rest if isinstance(one, events.Batch)]
    described = [one for one in rest if isinstance(one, dict)]
    cursor = batches[-1].first + len(batches[-1].events) if batches else None
    made = [journal.json_frames("describe", descriptions=[one]) for one in _missing(left.descriptions, described)]
    made += [[bytes(frame) for frame in events.encode(one)] for one in _batches(opening, left.events, cursor)]
    if how is not None:
        made.append(journal.json_frames("end", how=how(opening)))
    _append(path, made)


def _missing(left: Iterable[Mapping[str, Any]], described: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    known = {description_key(one) for one in described}
    yield from with_ranks_of_groups(one for one in left if description_key(one) not in known)


def _batches(opening: Opening, left: npt.NDArray[np.void], cursor: int | None) -> Iterator[events.Batch]:
    """Events from a sequence number on, in runs without a gap."""
    found = left if cursor is None else left[left["sequence"] >= cursor]
    for part in np.split(found, np.flatnonzero(np.diff(found["sequence"].astype(np.int64)) != 1) + 1):
        if len(part):
            first = int(part["sequence"][0])
            yield events.Batch(opening.rank, opening.session, first, first - (cursor or first), part)
            cursor = first + len(part)


def _append(path: Path, made: Iterable[list[bytes]]) -> None:
    """Appends messages behind the last complete one; of a partly written one nothing is left."""
    kept = [journal.pack(frames, number) for number, frames in enumerate(journal.messages(path))]
    size = len(journal.MAGIC) + sum(map(len, kept))
    data = b"".join(journal.pack(frames, len(kept) + number) for number, frames in enumerate(made))
    with path.open("r+b") as file:
        if path.stat().st_size > size:
            file.truncate(size)
        file.seek(size)
        file.write(data)
