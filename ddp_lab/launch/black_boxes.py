"""The last events of ranks that died, for their journals: see [Note: what a dead rank leaves].

The process of torch's agent makes a file in memory for each rank of this host. A rank opens its own through /proc and
records into it. When the run has ended, what a journal lacks is appended to it. A rank that torch's agent has started
again does that for its predecessor, before it uses the file itself.

For ranks that a script starts there are further files, empty until one of these ranks takes the first that is free: it
keeps a lock on it while it lives. The script, which knows how its processes ended, completes their journals.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import machine
from ..command_line import tell
from ..protocol import black_box, events, journal
from ..protocol.black_box import BlackBox, description_key, with_ranks_of_groups
from ..protocol.journal import BEFORE_ITS_END, ENDED_WITH_RUN, EXITED, Decoder, Opening

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["BlackBoxes", "attempt_of", "complete_children", "leave_in"]

_ATTEMPT = ".attempt"  # how names begin of what says whose attempt a number is
_OF_SCRIPT = 64  # ranks that a script starts: at most so many at a time leave something
_END_S, _LOOK_S = 25.0, 0.05  # for their processes, which end themselves when the script has ended

_How = Callable[[Opening], str]  # how the process of a journal ended that does not say it


class BlackBoxes:
    """Files in memory, one for each rank of this host, and further ones for those that a script may start.

    Args:
        ranks: how many torch's agent starts; a single one may be a script that starts ranks.

    Attributes:
        option: what a rank is told about them.
        exited: process ids of ranks that have exited by themselves, with code 0.
    """

    def __init__(self, ranks: int) -> None:
        self._files = [os.memfd_create(f"ddp_lab-rank{number}") for number in range(ranks)]
        self._of_script = [os.memfd_create("ddp_lab-of-script") for _ in range(_OF_SCRIPT if ranks == 1 else 0)]
        self.option = ",".join(map(str, (*self._files, *self._of_script)))
        self.exited: set[int] = set()
        self._how: _How | None = None  # None: not known

    def note(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Takes what torch's agent says of the ranks that failed; it has ended the others, with SIGTERM."""
        first = min(failures, key=lambda rank: failures[rank].timestamp, default=-1)
        ends: dict[int | None, str] = {one.pid: _words(one.exitcode) for one in failures.values()}
        ends |= {one.pid: ENDED_WITH_RUN for rank, one in failures.items() if _is_terminated(one) and rank != first}
        self._how = lambda one: EXITED if one.pid in self.exited else ends.get(one.pid, ENDED_WITH_RUN)

    @property
    def script_started_ranks(self) -> bool:
        """Whether one of its processes has used a file."""
        return any(os.fstat(file).st_size for file in self._of_script)

    def complete(self, folder: Path) -> None:
        """Appends to the journals in a folder what they lack: the last events, and how the process ended. Waits before
        that until the ranks that the script has started have ended, too."""
        self._wait()
        for file in (*self._files, *self._of_script):
            if (left := black_box.read(file)) is not None:
                _complete(folder, left, self._how)
        for path in folder.glob(f"{_ATTEMPT}*"):
            path.unlink()

    def close(self) -> None:
        """Closes the files."""
        for file in (*self._files, *self._of_script):
            os.close(file)

    def _wait(self) -> None:
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline and any(_is_used(file) for file in self._of_script):
            time.sleep(_LOOK_S)


def leave_in(agent: int, option: str, folder: Path, *, of_script: bool = False) -> None:
    """Lets this rank leave what it records; call it before anything is recorded.

    Args:
        agent: process id of who made the files.
        option: of `BlackBoxes`.
        folder: that of the run.
        of_script: the script has started it, not torch's agent.
    """
    from .. import native

    numbers = option.split(",")
    try:
        if of_script:
            file = _first_free(agent, numbers[1:])
        else:
            file = _opened(agent, numbers[int(os.environ.get("LOCAL_RANK", 0))])
    except OSError as error:
        tell(f"if this rank is killed, its last events are lost: can't open its file in memory: {error.strerror}")
        return
    try:
        if (left := black_box.read(file)) is not None:
            _complete(folder, left, None)
        native.load().leave_in(file)
    except OSError as error:
        tell(f"if this rank is killed, its last events are lost: {error.strerror}")
    finally:
        if not of_script:  # else it keeps the lock
            os.close(file)


def complete_children(agent: int, option: str, folder: Path, exits: Mapping[int, int]) -> None:
    """Completes the journals of ranks that this script has started, and that have ended; else as `leave_in`.

    Args:
        agent: process id of who made the files.
        option: of `BlackBoxes`.
        folder: that of the run.
        exits: process id -> its exit code, or minus the number of the signal that has ended it.
    """
    for number in option.split(",")[1:]:
        try:
            file = _opened(agent, number)
        except OSError:  # the agent has ended
            return
        try:
            left = black_box.read(file) if black_box.pid_of(file) in exits else None
        finally:
            os.close(file)
        if left is not None:
            _complete(folder, left, lambda one: _words_of_child(exits[one.pid or 0]))


def attempt_of(folder: Path, meeting: str, rank: int) -> int:
    """A number that the processes of one job of the script have in common, and those of no other: there may be several
    at a time, and each may be started again. The journal that comes then is this process's own.

    Args:
        folder: that of the run.
        meeting: where the job's ranks look for each other.
        rank: this one.
    """
    for number in itertools.count():
        owner = folder / f"{_ATTEMPT}{number}"
        try:
            with contextlib.suppress(FileExistsError):
                owner.symlink_to(meeting or "-")  # a file and what is in it, at once
            if os.readlink(owner) != (meeting or "-"):
                continue
            journal.path_of(folder, rank, number, of_child=True).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            continue
        except OSError:  # which the journal reports
            break
        return number
    return 0


def _opened(agent: int, number: str) -> int:
    return os.open(f"/proc/{agent}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


def _first_free(agent: int, numbers: Iterable[str]) -> int:
    """Opens and locks the first file that no living process uses.

    Raises:
        OSError: all are in use, or can't be opened.
    """
    for number in numbers:
        file = _opened(agent, number)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        os.close(file)
    raise BlockingIOError(None, "all are in use")


def _is_used(file: int) -> bool:
    """Whether the process that has taken it lives; forked ones that still have its lock do not count."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return (pid := black_box.pid_of(file)) is None or not machine.ended(pid)
    return False


def _words(code: int) -> str:
    """How a process ended that has not said it itself."""
    if code == 0:
        return EXITED
    if code > 0:
        return f"exit code {code} {BEFORE_ITS_END}"
    known = {int(one): one.name for one in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"


def _words_of_child(code: int) -> str:
    """The same of a rank that a script has started, which ends the others itself when one of them has failed."""
    return ENDED_WITH_RUN if code == -signal.SIGTERM else _words(code)


def _is_terminated(failed: ProcessFailure) -> bool:
    return failed.exitcode == -signal.SIGTERM


def _complete(folder: Path, left: BlackBox, how: _How | None) -> None:
    for path in folder.glob(f"*{journal.SUFFIX}"):
        try:
            _append_to(path, left, how)
        except (OSError, ValueError) as error:
            tell(f"{path} lacks the last events of its rank: {error}")


def _append_to(path: Path, left: BlackBox, how: _How | None) -> None:
    """Appends what a journal lacks, if it is that of this process and does not say how the program ended."""
    opening = next((one for one in Decoder(path).read() if isinstance(one, Opening)), None)
    if opening is None or (opening.pid, opening.host) != (left.pid, socket.gethostname()):
        return
    written = journal.read(path)
    if written.end is not None:
        return
    if written.damage:
        raise ValueError(written.damage[0])
    last = written.batches[-1] if written.batches else None
    cursor = last.first + len(last.events) if last is not None else None
    described = _missing(left.descriptions, written.descriptions)
    made = journal.event_messages(described, _batches(opening, left.events, cursor))
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
