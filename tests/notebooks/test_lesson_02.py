"""Lesson 2, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_LAYOUT = "%%distributed\ndef layout(world_size, per_host):\n    ranks = list(range(world_size))\n"
_HOSTS = "[ranks[i : i + per_host] for i in range(0, world_size, per_host)]"
_PLACES = "[ranks[i::per_host] for i in range(per_host)]"
_LAUNCH = """
def launch(script, world_size, port):
    processes = []
    for rank in range(world_size):
        environment = dict(os.environ) | {}
        output = {{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}}
        processes.append(subprocess.Popen([sys.executable, str(script)], env=environment, **output))
    return [process.communicate()[0] for process in processes]
"""


def _launch(**variables: str) -> str:
    """A launcher that gives its processes these variables; their values are expressions."""
    return _LAUNCH.format("{" + ", ".join(f'"{name}": {value}' for name, value in variables.items()) + "}")


_ADDRESS = {"MASTER_ADDR": "'127.0.0.1'", "MASTER_PORT": "str(port)"}
_RANK, _SIZE = {"RANK": "str(rank)"}, {"WORLD_SIZE": "str(world_size)"}

WRONG = {
    "1": {
        _LAYOUT + f"    return {_PLACES}, {_HOSTS}": "return `hosts` first",
        _LAYOUT + f"    return {_HOSTS}, [ranks[::per_host]]": "in exactly one group",
        _LAYOUT + f"    return {_HOSTS}, {_HOSTS}": "`places` has 2 groups, but there are 4 places",
        _LAYOUT + f"    return [ranks[::2], ranks[1::2]], {_PLACES}": "rank 0 should be with [1, 2, 3]",
        _LAYOUT
        + f"    return {_HOSTS}, [ranks[i::4] for i in range(4)]": "`places` has 4 groups, but there are 2 places",
        _LAYOUT + "    return rank_list": "raises NameError",
    },
    "2": {
        _launch(**_ADDRESS, **_SIZE): "without RANK",
        _launch(**_ADDRESS, **_SIZE, RANK="'0'"): "the numbers are 0, 0, 0",
        _launch(**_ADDRESS, **_SIZE, RANK="rank"): "are strings",
        _launch(**_ADDRESS, **_SIZE, **_RANK).replace("return ", ""): "Return what each process printed",
        _launch(**_ADDRESS, **_RANK, WORLD_SIZE="str(rank)"): "WORLD_SIZE is '0', but should be '3'",
        _launch(**_RANK, **_SIZE, MASTER_ADDR="f'host{rank}'", MASTER_PORT="str(port)"): "MASTER_ADDR is 'host0'",
    },
}

CAME_TRUE = {
    2: "−1",
    3: "one address, its number and the number of processes",
    4: "get waits for the key",
}

SHORTER = {"for _ in range(30):": "for _ in range(3):", "\nddp_lab.comm.capabilities()": ""}


def test_launchers_and_stores(lesson: running.Notebook) -> None:
    """torchrun and the reader's launcher make two ranks each, and a store makes rank 1 wait for the key."""
    launched = running.text(running.cell(lesson, "launch"))
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE"):
        assert re.search(rf"{name} +\S+ +\S+", launched)
    assert re.search(r"\nRANK +0 +1", launched)
    assert "environment variable RANK expected" in running.text(running.cell(lesson, "exercise-2"))
    started = running.text(running.cell(lesson, "solution-2"))
    for rank in range(2):
        assert f'process {rank}: {{"rank": {rank}, "ranks": 2, ' in started
    assert "s: b'hello'" in running.text(running.cell(lesson, "store"))


def test_groups_and_backends(lesson: running.Notebook) -> None:
    """A rank has no number in a group of others; the backends are drawn."""
    assert "rank -1 of -1" in running.text(running.cell(lesson, "groups"))
    lines = running.figure(running.cell(lesson, "carriers"))["data"]
    assert [line["name"] for line in lines] == ["gloo", "shm"]
