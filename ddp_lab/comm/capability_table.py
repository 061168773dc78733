"""Which operation works with which backend on which device: found out by trying, on this machine.

Two processes are started (`capability_trial.py`) that form a group of each backend and try each operation with tensors
of each device. What they write is read here.
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
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(folder, rank) for rank in range(_RANKS)]
        deadline = time.monotonic() + timeout_seconds
        try:
            for rank in ranks:
                rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = f"no answer within {timeout_seconds:g} s"
        else:
            codes = [rank.returncode for rank in ranks]
            stopped = "" if not any(codes) else f"the processes that tried it ended with codes {codes}"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return Capabilities(_read(Path(folder), stopped))


def _start(folder: str, rank: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
    with open(f"{folder}/log {rank}", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ddp_lab.comm.capability_trial", folder, str(rank)],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _read(folder: Path, stopped: str) -> list[Capability]:
    """The answers; if the trial `stopped`, what it was trying then is answered with that."""
    answers = folder / "answers"
    lines: list[dict[str, Any]] = (
        [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []
    )
    found = [Capability(**line) for line in lines if "works" in line]
    if not stopped:
        return found
    last = [
        line for rank in range(_RANKS) for line in (folder / f"log {rank}").read_text(errors="replace").splitlines()
    ]
    why = f"{stopped}: {last[-1]}" if last else stopped
    if not lines:
        raise RuntimeError(f"nothing could be tried: {why}")
    trying = {name: str(lines[-1][name]) for name in ("operation", "backend", "device")}
    return [*found, Capability(**trying, works=False, why_not=why)]
