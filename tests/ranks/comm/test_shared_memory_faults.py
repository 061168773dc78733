"""Groups in shared memory that break at random moments: all ranks are told why, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S

BROKEN_GROUPS = Path(__file__).parents[1] / "programs" / "broken_groups.py"
TOLD = {
    "kill": "rank {} ended while",
    "stop": "rank {} ended while",
    "mismatch": "ranks called different operations: rank {}",
    "timeout": "Timed out waiting 300ms",
    "abort": "rank {} aborted the group",
}
Break = Callable[[str, int, random.Random], list[str | None]]


@pytest.fixture(scope="module")
def break_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Break]:
    """Runs a group until it breaks: fault, size and draw to what each rank was told; see `broken_groups.py`."""
    process = subprocess.Popen(
        [sys.executable, str(BROKEN_GROUPS), str(tmp_path_factory.mktemp("stores")), str(DEADLINE_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    stdin, stdout = process.stdin, process.stdout

    def run(fault: str, size: int, draw: random.Random) -> list[str | None]:
        asked = {"fault": fault, "size": size, "victim": draw.randrange(size), "seed": draw.randrange(1 << 30)}
        stdin.write(json.dumps(asked) + "\n")
        stdin.flush()
        told = json.loads(stdout.readline())
        words = TOLD[fault].format(asked["victim"])
        for rank, text in enumerate(told):
            killed = fault in ("kill", "stop") and rank == asked["victim"]
            right = (
                text is None if killed else "shm: " in text and (words in text or _names(text, fault, asked["victim"]))
            )
            assert right, (asked, told)
        return told

    yield run
    stdin.close()
    process.wait(DEADLINE_S)
    stdout.close()


def _names(text: str, fault: str, victim: int) -> bool:
    """A mismatch is told by whoever sees it first, with the victim on either side."""
    return fault == "mismatch" and "ranks called different operations" in text and f"rank {victim} " in text


def _break_often(break_group: Break, fault: str, sizes: tuple[int, ...], times: int) -> None:
    before = set(os.listdir("/dev/shm"))
    draw = random.Random(fault)
    for _ in range(times):
        break_group(fault, draw.choice(sizes), draw)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "ddp_lab" in name}


@pytest.mark.parametrize("fault", TOLD)
def test_all_ranks_are_told(break_group: Break, fault: str) -> None:
    """Once for each fault, on eight ranks."""
    _break_often(break_group, fault, (8,), 1)


@pytest.mark.soak
@pytest.mark.parametrize("fault", TOLD)
def test_all_ranks_are_told_at_any_moment(break_group: Break, fault: str) -> None:
    """Hundreds of times in all, on 2 to 8 ranks."""
    _break_often(break_group, fault, (2, 3, 4, 8), 100)
