"""Scripts that start their ranks themselves, with `torch.multiprocessing` or `multiprocessing`, under `ddp-lab run`.

[Note: ranks that a script starts]
Torch's agent starts such a script once, as a rank that it is not. Its children inherit the agent's variables: with
these they would wait forever for a store that nobody serves. So each child forgets them first, as far as the script has
not set them itself. A child may also load data, or write logs: who watches the run can examine it, and no more. It is a
rank when it looks for the other ranks of its first process group: from then on it writes a journal under the number
that it has there, and leaves its last events in a file of the agent. Where there are such ranks, the script itself is
none: readers ignore its journal, and the watch what it answers.

Ranks are of one job if they meet at the same port or file. Several jobs at a time may have the same ranks, so each is
watched for itself, and its journals have the number of an attempt that no other job has.

Torch's agent knows the script alone: how its children ended is noted by the script, as it ends. They get the signals
that the agent sends to the script, because it sends them to its session; and they end when the script has ended,
however it did. Ranks that the script starts as commands forget the agent, too; they are not recorded, and that is told.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ..command_line import tell
from ..diagnosis.stacks import is_library
from ..engine.groups import script_interrupt
from ..engine.processes.parent_watch import on_exit
from ..errors import DdpLabError
from ..formatting import line_name
from ..machine import no_collector
from .black_boxes import attempt_of, complete_children, leave_in
from .endpoint_file import Examined
from .recorded_rank import GRACE_SECONDS, about_me, begin_journal, end_this_process, reach_models, that_ends

__all__ = ["ChildProcess", "record_children", "variables_of_agent"]

_OF_THE_AGENT = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "RANK", "WORLD_SIZE")  # as names begin
_LOADS_DATA = "torch.utils.data"


@dataclass(frozen=True)
class ChildProcess:
    """What makes a child of the script record once it is a rank; picklable.

    Attributes:
        folder: for its journal.
        script: that is run. A child has imported it before: torch's own classes are observed, not replaced.
        given: the variables of torch's agent.
        agent: process id of who made the files for the last events; None if there are none.
        boxes: what is told about these files, see `BlackBoxes`.
        doctor: file with which a rank can connect to who examines it; None if nobody does.
        place: where the script starts the child, to follow other words; "" if that is not known.
    """

    folder: Path
    script: str
    given: Mapping[str, str]
    agent: int | None = None
    boxes: str | None = None
    doctor: Path | None = None
    place: str = ""

    @property
    def is_started_often(self) -> bool:
        """Whether torch's agent has started the script several times: then its processes are ranks themselves."""
        return int(self.given.get("WORLD_SIZE", 1)) > 1

    @property
    def too_many(self) -> str:
        """What is wrong then if the script starts ranks, too."""
        return (
            f"the script starts its ranks itself{self.place}, and torch's agent has started it "
            f"{self.given['WORLD_SIZE']} times: run it without --nproc-per-node"
        )

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Calls the function, in the child."""
        if self.is_started_often:
            if "torch.distributed" in sys.modules:
                self._refuse_other_ranks()
            return function(*args, **named)
        self._forget_the_agent()
        ending: list[Callable[[str], None]] = []
        if "torch.distributed" in sys.modules:  # else it would take seconds to import, perhaps for nothing
            self._record_as_a_rank(ending, self._examined(ending))
        with that_ends(ending):
            return function(*args, **named)

    def _examined(self, ending: list[Callable[[str], None]]) -> Examined | None:
        if self.doctor is None:
            return None
        try:
            with no_collector():
                examined = Examined(self.doctor, self.given)
        except OSError as error:
            tell(f"hangs of process {os.getpid()} are not noticed: can't read {error.filename}: {error.strerror}")
            return None
        ending.append(examined.end)
        return examined

    def _forget_the_agent(self) -> None:
        """Removes the agent's variables; if the script has chosen a port, what it has set may have the same value."""
        unchanged = [name for name, value in self.given.items() if os.environ.get(name) == value]
        for name in unchanged:
            if "MASTER_PORT" in unchanged or name.startswith("TORCHELASTIC_"):
                del os.environ[name]

    def _refuse_other_ranks(self) -> None:
        """Makes a rank that is not the one of torch's agent fail, which would wait forever for a store."""
        from torch.distributed import distributed_c10d

        c10d: Any = distributed_c10d

        meet = c10d.rendezvous

        @functools.wraps(meet)
        def checked(url: str, rank: int = -1, *args: Any, **named: Any) -> Any:
            own = [name for name, value in self.given.items() if os.environ.get(name) != value]
            if url.startswith("env:") and (own or rank not in (-1, int(self.given["RANK"]))):
                raise DdpLabError(self.too_many)
            return meet(url, rank, *args, **named)

        c10d.rendezvous = checked

    def _record_as_a_rank(self, ending: list[Callable[[str], None]], examined: Examined | None) -> None:
        """Begins when the process looks for the ranks of its first group, or is given the store where they meet."""
        from torch.distributed import distributed_c10d

        c10d: Any = distributed_c10d

        meet, make, own = c10d.rendezvous, c10d._new_process_group_helper, os.getpid()

        def begin(rank: int, size: int, place: str, port: int) -> None:
            c10d.rendezvous, c10d._new_process_group_helper = meet, make
            if os.getpid() != own:  # forked
                return
            with no_collector():
                self._begin(rank, size, place, ending)
                if examined is not None:
                    examined.join(rank, size, place)
                script_interrupt.install(port)
                reach_models(observe=True)

        @functools.wraps(meet)
        def looked_for(url: str, rank: int = -1, size: int = -1, **named: Any) -> Any:
            rank_and_size, port = _numbers(url, rank, size), _port(url)
            if rank_and_size is not None:
                begin(*rank_and_size, f"port {port}" if port else urlsplit(url).path, port)
            return meet(url, rank, size, **named)

        @functools.wraps(make)
        def first(size: int, rank: int, *args: Any, **named: Any) -> Any:
            begin(rank, size, *_place_of([*args, *named.values()]))
            return c10d._new_process_group_helper(size, rank, *args, **named)

        c10d.rendezvous, c10d._new_process_group_helper = looked_for, first

    def _begin(self, rank: int, size: int, place: str, ending: list[Callable[[str], None]]) -> None:
        if self.agent is not None and self.boxes is not None:
            leave_in(self.agent, self.boxes, self.folder, of_script=True)
        about = {**about_me(self.script), "rank": rank, "world_size": size}
        about["restart"] = attempt_of(self.folder, place, rank)
        ending.append(begin_journal(self.folder, about, size, of_child=True))
        _end_with_script()


def _numbers(url: str, rank: int, size: int) -> tuple[int, int] | None:
    """The rank, and how many there are, as torch's rendezvous takes them; None if they are not known before it."""
    parts = urlsplit(url)
    given: dict[str, Any] = {"rank": rank, "world_size": size}
    given = {**dict(parse_qsl(parts.query)), **{name: value for name, value in given.items() if value != -1}}
    if parts.scheme == "env":
        given = {name: os.environ.get(name.upper(), "") for name in ("rank", "world_size")} | given
    try:
        return int(given["rank"]), int(given["world_size"])
    except (KeyError, ValueError):  # torch says what is wrong
        return None


def _port(url: str) -> int:
    """Of the store of a rendezvous; 0 if it has none."""
    parts = urlsplit(url)
    try:
        return int(os.environ.get("MASTER_PORT", 0)) if parts.scheme == "env" else parts.port or 0
    except ValueError:  # torch says what is wrong
        return 0


def _place_of(arguments: Iterable[Any]) -> tuple[str, int]:
    """Where the ranks meet, by the rendezvous store among these; and its port, 0 if it has none."""
    from torch import distributed

    dist: Any = distributed
    store = next((one for one in arguments if isinstance(one, dist.Store)), None)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    port = int(getattr(store, "port", 0))
    return f"port {port}" if port else str(getattr(store, "path", "")), port


def variables_of_agent() -> dict[str, str]:
    """Those with which torch's agent has started this process."""
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_THE_AGENT)}


def record_children(child: ChildProcess) -> Callable[[str], None]:
    """From now on, processes that the script starts record what they do as ranks; see `ChildProcess`.

    Args:
        child: what they do, but for their places.

    Returns:
        What notes how they ended: to be called with how the script ended.
    """
    spawning: Any = sys.modules["torch.multiprocessing.spawn"]
    of_process: Any = multiprocessing.process.BaseProcess
    start, children = of_process.start, _Children()

    @functools.wraps(start)
    def started(process: Any) -> None:
        target: Any = getattr(process, "_target", None)
        here, can_be_rank = replace(child, place=_line()), True
        if target is spawning._wrap:
            if here.is_started_often:
                raise DdpLabError(here.too_many)
            # It calls the first of the arguments, and keeps its error from who looks from outside.
            process._args = (functools.partial(here.run, process._args[0]), *process._args[1:])
        elif target is not None and not str(getattr(target, "__module__", "")).startswith(_LOADS_DATA):
            process._target = functools.partial(here.run, target)
        else:
            can_be_rank = False
        start(process)
        if can_be_rank:
            children.add(process)

    def end(how: str) -> None:
        if child.agent is not None and child.boxes is not None:
            complete_children(child.agent, child.boxes, child.folder, children.exits())

    of_process.start = started
    if child.given.get("WORLD_SIZE") == "1":
        _let_commands_be_ranks(child.given)
    return end


class _Children:
    """How the processes that this one has started ended; it keeps none of them longer than multiprocessing does."""

    def __init__(self) -> None:
        self._own, self._running = os.getpid(), list[Any]()
        self._exits: dict[int, int] = {}

    def add(self, process: Any) -> None:
        """Notes that it was started."""
        self.exits()
        self._running.append(process)

    def exits(self) -> dict[int, int]:
        """Process id -> exit code, or minus the number of a signal; of those that have ended."""
        if os.getpid() != self._own:  # forked: they are not its own
            return {}
        for one in list(self._running):
            try:
                code = one.exitcode
            except ValueError:  # the script has closed it
                self._running.remove(one)
                continue
            if code is not None:
                self._exits[one.pid] = code
                self._running.remove(one)
        return self._exits


def _end_with_script() -> None:
    """Makes this process end soon after the script, whose end it may not have noticed."""
    parent = multiprocessing.process.parent_process()
    script = None if parent is None else parent.pid

    def end() -> None:
        tell(f"the script (process {script}) exited, so this rank ends too")
        if callable(signal.getsignal(signal.SIGTERM)):  # it may be running for the one that has ended the script
            threading.Event().wait(GRACE_SECONDS)
        end_this_process()

    if script is not None:
        on_exit(script, end)


def _let_commands_be_ranks(given: Mapping[str, str]) -> None:
    """From now on, commands that the script starts as other ranks than its own are without the agent's variables, with
    which they would wait for its store; the first is told.

    Args:
        given: the variables of torch's agent.
    """
    of_command: Any = subprocess.Popen
    make, untold = of_command.__init__, ["once"]

    @functools.wraps(make)
    def made(process: Any, *args: Any, **named: Any) -> None:
        own = dict(os.environ if named.get("env") is None else named["env"])
        if own.get("RANK") and any(own.get(name) != given.get(name) for name in ("RANK", "WORLD_SIZE")):
            named["env"] = {name: value for name, value in own.items() if not name.startswith("TORCHELASTIC_")}
            if untold:
                untold.clear()
                tell(
                    f"the script starts ranks as commands of its own{_line()}: these are not recorded, and nothing is "
                    f"said of their hangs. To record them, let torch's agent start them: `ddp-lab run --standalone "
                    f"--nproc-per-node {own.get('WORLD_SIZE', 'N')}`, then what each of these commands runs"
                )
        make(process, *args, **named)

    of_command.__init__ = made


def _line() -> str:
    """The user's line that called this, in parentheses; "" if there is none."""
    for frame in reversed(traceback.extract_stack()):
        if not is_library(frame.filename):
            return f" ({line_name(frame.filename, frame.lineno)})"
    return ""
