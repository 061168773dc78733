"""Which operation works with which backend on which device: found out by trying, on this machine.

Two processes are started (`capability_trial.py`) that form a group of each backend and try each operation with tensors
of each device. What they write is read here. An operation can end a process (Gloo's does where it is given memory that
it can't read): then two new ones go on with the next.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Capabilities", "Capability", "capabilities"]

_RANKS = 2
_MARKS = {True: "✓", False: "✘"}


@dataclass(frozen=True)
class Capability:
    """One answer.

    Attributes:
        operation: its name in `torch.distributed`, e.g. ``"all_reduce"``; ``""``: the answer is for all operations,
            which could not be tried.
        backend: e.g. ``"gloo"``.
        device: ``"cpu"`` or ``"cuda"``.
        works: whether it gave the right result on both ranks.
        why_not: what it said, or why it could not be tried.
    """

    operation: str
    backend: str
    device: str
    works: bool
    why_not: str


class Capabilities:
    """The table operation x backend x device of this machine, as `capabilities` found it; print it or show it.

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
        """What was tried, in torch's names."""
        return list(dict.fromkeys(one.operation for one in self._answers if one.operation))

    @property
    def unavailable(self) -> dict[tuple[str, str], str]:
        """(backend, device) -> why it could not be tried here."""
        return {(one.backend, one.device): one.why_not for one in self._answers if not one.operation}

    def works(self, operation: str, backend: str, device: str = "cpu") -> bool:
        """Whether an operation works; False where backend or device are not there.

        Raises:
            ValueError: no such operation was tried.
        """
        if operation not in self.operations:
            raise ValueError(f"{operation!r} is none of {', '.join(self.operations)}")
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
        """Why what isn't there isn't, equal reasons once."""
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
        timeout_seconds: what has not been answered by then is told as such.

    Returns:
        The table; `print` it, or let a notebook show it.

    Raises:
        RuntimeError: nothing could be tried, and why.

    Example:
        >>> table = ddp_lab.comm.capabilities()
        >>> table.works("reduce_scatter", "gloo", "cpu")
        True
    """
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while True:
            tried = len(_lines(folder))
            stopped = _run_ranks(folder, deadline)
            if not stopped:
                return Capabilities(_answers(folder))
            lines = _lines(folder)
            if len(lines) == tried and not _answers(folder):
                raise RuntimeError(f"nothing could be tried: {stopped}")
            if len(lines) > tried and "works" not in lines[-1]:
                _write(folder, {**lines[-1], "works": False, "why_not": stopped})
            if len(lines) == tried or time.monotonic() >= deadline:
                return Capabilities(_answers(folder))


def _run_ranks(folder: Path, deadline: float) -> str:
    """Starts the ranks; returns ``""`` when they have tried everything, else why they did not."""
    ranks = [_start(folder, rank) for rank in range(_RANKS)]
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            if not any(code is None for code in codes) or any(codes):
                break
            if time.monotonic() >= deadline:
                return "no answer in the time that was given"
            time.sleep(0.02)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if not any(codes):
        return ""
    first = next(rank for rank, code in enumerate(codes) if code)
    said = (folder / f"log {first}").read_text(errors="replace").splitlines()
    return f"it ended the process with code {codes[first]}" + (f": {said[-1]}" if said else "")


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
    with (folder / f"log {rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ddp_lab.comm.capability_trial", str(folder), str(rank)],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _lines(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 has written: a dict without ``works`` before it tries something, one with it after that."""
    answers = folder / "answers"
    return [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []


def _write(folder: Path, line: dict[str, Any]) -> None:
    with (folder / "answers").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _answers(folder: Path) -> list[Capability]:
    return [Capability(**line) for line in _lines(folder) if "works" in line]
