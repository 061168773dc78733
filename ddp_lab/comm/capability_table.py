"""Which operation works with which backend on which device, determined by trying it on this machine.

Two processes are started (`capability_trial.py`), and two more by mpiexec if there is MPI. They form a group of each
backend and try each operation with tensors of each device. Their answers are read here. An operation can end a process
(e.g. Gloo's on memory that it can't read): then two new ones continue with the next.
"""

from __future__ import annotations

import html
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocol.entry_points import CAPABILITY_TRIAL
from . import mpi

__all__ = ["Capabilities", "Capability", "capabilities"]

_BACKENDS = ("gloo", "shm", "round_robin", "nccl", "mpi", "ucc")
_RANKS = 2
_PYTHON = "the program of the trial, with its folder"
# Allows two processes on any host, also for root; options of Open MPI 4 and 5.
_MPI_ON_ONE_HOST = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
_MARKS = {True: "✓", False: "✘"}


@dataclass(frozen=True)
class Capability:
    """The result for one operation.

    Attributes:
        operation: its name in `torch.distributed`, e.g. ``"all_reduce"``; ``""``: the result is for all operations,
            none of which could be tried.
        backend: e.g. ``"gloo"``.
        device: ``"cpu"`` or ``"cuda"``.
        works: whether it gave the right result on both ranks.
        why_not: its error, or why it could not be tried.
    """

    operation: str
    backend: str
    device: str
    works: bool
    why_not: str


class Capabilities:
    """The table operation x backend x device of this machine, as `capabilities` determined it; print it or display it.

    Iterating gives each `Capability`.
    """

    def __init__(self, answers: list[Capability]) -> None:
        self._answers = answers

    def __iter__(self) -> Iterator[Capability]:
        return iter(self._answers)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Each (backend, device) that could be tried."""
        return list(dict.fromkeys((one.backend, one.device) for one in self._answers if one.operation))

    @property
    def operations(self) -> list[str]:
        """The tried operations, with torch's names."""
        return list(dict.fromkeys(one.operation for one in self._answers if one.operation))

    @property
    def unavailable(self) -> dict[tuple[str, str], str]:
        """(backend, device) -> why it could not be tried here."""
        return {(one.backend, one.device): one.why_not for one in self._answers if not one.operation}

    def works(self, operation: str, backend: str, device: str = "cpu") -> bool:
        """Whether an operation works; False if backend or device are not available.

        Raises:
            ValueError: no such operation was tried.
        """
        if operation not in self.operations:
            raise ValueError(f"{operation!r} was not tried: choose one of {', '.join(self.operations)}")
        found = (
            one.works
            for one in self._answers
            if (one.operation, one.backend, one.device) == (operation, backend, device)
        )
        return next(found, False)

    def _rows(self) -> list[list[str]]:
        marks = {(one.operation, one.backend, one.device): _MARKS[one.works] for one in self._answers}
        return [
            [operation, *(marks.get((operation, *column), "?") for column in self.columns)]
            for operation in self.operations
        ]

    def _notes(self) -> list[str]:
        """Why parts are not available; equal reasons once."""
        places: dict[str, list[str]] = {}
        for (backend, device), why_not in self.unavailable.items():
            places.setdefault(why_not, []).append(f"{backend} on {device}")
        for one in self._answers:
            if one.operation and not one.works:
                places.setdefault(one.why_not, []).append(f"{one.operation} with {one.backend} on {one.device}")
        return [f"{', '.join(where)}: {why_not}" for why_not, where in places.items()]

    def __str__(self) -> str:
        head = ["", *(f"{backend} {device}" for backend, device in self.columns)]
        widths = [max(len(row[i]) for row in [head, *self._rows()]) for i in range(len(head))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(row[i].center(widths[i]) for i in range(1, len(row)))]).rstrip()
            for row in [head, *self._rows()]
        ]
        return "\n".join([*lines, "", *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(backend)}<br>{device}</th>" for backend, device in self.columns)
        rows = "".join(
            f'<tr><td style="text-align:left">{html.escape(row[0])}</td>'
            + "".join(f'<td style="text-align:center">{mark}</td>' for mark in row[1:])
            + "</tr>"
            for row in self._rows()
        )
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self._notes())
        return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table><ul>{notes}</ul>"


def capabilities(timeout_seconds: float = 180.0) -> Capabilities:
    """Tries every operation of `torch.distributed` with every backend on every kind of device of this machine.

    Two processes on this host do it, apart from any group of the caller's; with one GPU they share it. It takes a few
    seconds, most of them for importing torch.

    Args:
        timeout_seconds: operations without a result by then are reported as such.

    Returns:
        The table; `print` it, or let a notebook display it.

    Raises:
        RuntimeError: nothing could be tried; the message says why.

    Example:
        >>> table = ddp_lab.comm.capabilities()
        >>> table.works("reduce_scatter", "gloo", "cpu")
        True
    """
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mpiexec = shutil.which("mpiexec") if mpi.ours() else None
        plain = [backend for backend in _BACKENDS if backend != mpi.NAME or mpiexec is None]
        _try(folder, [[_PYTHON, str(rank), *plain] for rank in range(_RANKS)], deadline)
        if mpiexec is not None:
            _try(folder, [[mpiexec, "-n", str(_RANKS), _PYTHON, "mpi", mpi.NAME]], deadline)
        return Capabilities(_answers(folder))


def _try(folder: Path, commands: Sequence[Sequence[str]], deadline: float) -> None:
    """Runs these commands until all results are there; restarts them after an operation that has ended them."""
    while True:
        tried = len(_lines(folder))
        stopped = _run_ranks(folder, commands, deadline)
        lines = _lines(folder)
        if not stopped:
            return
        if not lines:
            raise RuntimeError(f"nothing could be tried: {stopped}")
        if "works" not in lines[-1]:
            _write(folder, {**lines[-1], "works": False, "why_not": stopped})
        if len(lines) == tried or time.monotonic() >= deadline:
            return


def _run_ranks(folder: Path, commands: Sequence[Sequence[str]], deadline: float) -> str:
    """Runs the commands; returns ``""`` when everything has been tried, else why it was not."""
    running = [_start(folder, number, command) for number, command in enumerate(commands)]
    try:
        while True:
            codes = [one.poll() for one in running]
            if not any(code is None for code in codes) or any(codes):
                break
            if time.monotonic() >= deadline:
                return "no answer within the time limit"
            time.sleep(0.02)
    finally:
        for one in running:
            one.kill()
            one.wait()
    if not any(codes):
        return ""
    first = next(number for number, code in enumerate(codes) if code)
    said = (folder / f"log {first}").read_text(errors="replace").splitlines()
    return f"it ended the process with exit code {codes[first]}" + (f": {said[-1]}" if said else "")


def _start(folder: Path, number: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    # Independent of an mpiexec that has started the caller.
    own = {name: value for name, value in os.environ.items() if not name.startswith(mpi.LAUNCHED)}
    environment = {**own, **_MPI_ON_ONE_HOST, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
    trial = [sys.executable, "-m", CAPABILITY_TRIAL, str(folder)]
    words = [word for given in command for word in (trial if given == _PYTHON else [given])]
    with (folder / f"log {number}").open("wb") as log:
        return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Rank 0's answers: a dict without ``works`` before it tries something, one with it after that."""
    answers = folder / "answers"
    return [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []


def _write(folder: Path, line: dict[str, Any]) -> None:
    with (folder / "answers").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _answers(folder: Path) -> list[Capability]:
    return [Capability(**line) for line in _lines(folder) if "works" in line]
