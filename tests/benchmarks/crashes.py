"""Crashes planted in scripts and in cells: does what is printed name the guilty rank, and the user's lines?

The programs and their lines are in `tests/ranks/programs/planted_crashes.py`. One is named if one message says which
rank is guilty, what it did, and every marked line of the program. Whether a sentence is false, a reader has to judge:
``--texts`` prints all that the user sees.
"""

from __future__ import annotations

import html
import inspect
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddp_lab.bench.measuring.command import option
from ddp_lab.cluster.cluster import Cluster
from ddp_lab.errors import CellError
from ddp_lab.output.board import LineBoard, SilentBoard
from ddp_lab.output.terminal import plain
from tests.ranks.programs import planted_crashes

SCRIPT = Path(planted_crashes.__file__)
LIMIT_S = 120.0
HANG_S = 4.0
# What goes wrong -> what says so, with the guilty rank.
CAUSES = {
    "other_size": r"rank {guilty}\b.*( of \d+ B|sizes)",
    "other_call": r"rank {guilty} (entered |is in )?\w+ #\d+",
    "fewer": r"rank {guilty} (made|left|(entered |is in )?\w+ #\d+)",
    "finished": r"rank {guilty} (had|has) finished",
    "killed": r"rank {guilty} was killed by SIGKILL",
    "out_of_memory": r"rank {guilty} (ended early|failed).*[Mm]emory",
    "swallowed": r"rank {guilty} (had|has) finished",
}
PROGRAMS = [f"{family}_{kind}" for kind in CAUSES for family in ("ddp", "fsdp", "groups")]
GUILTY = {"ddp_other_call": 0, "fsdp_other_call": 0, "groups_other_size": 2, "groups_other_call": 2}
SETUP = "import logging, os, signal\nfrom torch.distributed.fsdp import fully_shard\nones = torch.ones(2, 4)\n"
SETUP += "torch.set_num_threads(1)\n" + inspect.getsource(planted_crashes.kill)
OURS, TORCHS = (f"from {package} import DistributedDataParallel\n" for package in ("ddp_lab", "torch.nn.parallel"))


def kind_of(program: str) -> str:
    """What goes wrong in it."""
    return program.partition("_")[2]


def ranks_of(program: str) -> int:
    """On how many ranks it runs."""
    return 3 if program.startswith("groups") else 2


def observed(program: str) -> bool:
    """Whether torch's class is kept: in each second kind."""
    return list(CAUSES).index(kind_of(program)) % 2 == 0


def marked_lines(program: str) -> list[int]:
    """Numbers of the lines that have to be named, from 1 where the function begins."""
    lines = inspect.getsource(getattr(planted_crashes, program)).splitlines()
    return [number for number, line in enumerate(lines, 1) if re.search(r"  # [A-Z]$", line)]


def in_script(program: str, backend: str) -> str:
    """What `ddp-lab run` prints, and the report's text."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "ddp_lab", "run", "--record", folder, "--standalone", "--on-hang", "stop"]
        run += ["--hang-seconds", str(HANG_S), "--nproc-per-node", str(ranks_of(program))]
        run += ["--observe"] if observed(program) else []
        command = [*run, str(SCRIPT), program, backend]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        page = Path(folder, "report.html")
        first = _first_section(page.read_text(encoding="utf-8")) if page.exists() else "(none)"
    return f"{done.stderr}\n{done.stdout}\n---- report ----\n{first}"


def _first_section(page: str) -> str:
    body = page[page.index("<body") :]
    text = html.unescape(re.sub(r"<svg.*?</svg>|<script.*?</script>|<[^>]+>", " ", body, flags=re.DOTALL))
    return re.sub(r"\s*\n\s*", "\n", text)[:3000]


def in_cell(lab: Cluster, program: str) -> str:
    """What a notebook shows below the cell."""
    board = _Board()
    lab.run(SETUP + (TORCHS if observed(program) else OURS), board=SilentBoard())
    code = f"{inspect.getsource(getattr(planted_crashes, program))}{program}()"
    try:
        run = lab.run(code, board=board, timeout=LIMIT_S, wait=False)
        while not run.done:
            if board.told.wait(0.1):
                run.interrupt()
                break
        run.wait()
    except CellError as error:
        board.lines.append(error.report)
    return plain("\n".join(board.lines))


class _Board(LineBoard):
    """Keeps what is shown, and notes that something is said of a cell that hangs."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(lambda _, line: self.lines.append(line))
        self.told = threading.Event()

    def announce(self, ranks: Iterable[int], text: str, stays: bool = False) -> None:
        super().announce(ranks, text, stays)
        if stays and not text.startswith("ranks have waited"):  # for an import: that ends by itself
            self.told.set()


def is_named(text: str, program: str, first: int) -> bool:
    """Whether one message of the text names rank, cause and lines.

    Args:
        text: what is shown.
        program: its name.
        first: number of the line in which the function begins.
    """
    cause = CAUSES[kind_of(program)].format(guilty=GUILTY.get(program, 1))
    messages = re.split(r"\n(?=ddp-lab: |\[)", text.partition("---- report ----")[0])
    lines = [re.compile(rf"(:|line |> ){number + first - 1}\b") for number in marked_lines(program)]
    return any(
        re.search(cause, message, re.IGNORECASE | re.DOTALL) and all(line.search(message) for line in lines)
        for message in messages
    )


def measure(
    programs: Sequence[str] = tuple(PROGRAMS),
    where: Sequence[str] = ("script", "cell"),
    backend: str = "gloo",
    texts: bool = False,
) -> dict[str, Any]:
    """Runs the programs.

    Args:
        programs: of `PROGRAMS`.
        where: ``"script"``, ``"cell"``.
        backend: of the ranks' groups.
        texts: whether to print what the user sees.

    Returns:
        ``found``: (where, program) -> ``named``, ``text``.
    """
    found: dict[str, Any] = {}

    def note(place: str, program: str, text: str, first: int) -> None:
        found[f"{place} {program}"] = {"named": is_named(text, program, first), "text": text}
        if texts:
            print(f"======== {place} {program}: {found[f'{place} {program}']['named']}\n{text}", flush=True)

    if "script" in where:
        for program in programs:
            first = inspect.getsourcelines(getattr(planted_crashes, program))[1]
            note("script", program, in_script(program, backend), first)
    if "cell" in where:
        for ranks in sorted({ranks_of(program) for program in programs}):
            with Cluster(ranks, backend=backend, hang_seconds=HANG_S) as lab:
                for program in [one for one in programs if ranks_of(one) == ranks]:
                    note("cell", program, in_cell(lab, program), 1)
    return {"backend": backend, "found": found}


def table(result: dict[str, Any]) -> str:
    """Which are named, as lines."""
    found = result["found"]
    lines = [f"  {'named' if one['named'] else '-----'}  {name}" for name, one in found.items()]
    count = sum(one["named"] for one in found.values())
    return "\n".join([f"backend {result['backend']}: {count} of {len(found)} named", *lines])


OPTIONS = (
    option("--programs", nargs="+", choices=PROGRAMS, metavar="PROGRAM"),
    option("--where", nargs="+", choices=["script", "cell"], metavar="WHERE"),
    option("--backend", choices=["gloo", "shm"], help="of the ranks' groups (default: %(default)s)"),
    option("--texts", action="store_true", help="print what the user sees"),
)
