"""The table operation x backend x device, as it is found out on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_lab.comm import Capabilities, capabilities, capability_trial, mpi
from tests.leftovers import processes
from tests.ranks.conftest import Ranks
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def table() -> Capabilities:
    return capabilities()


def test_what_works_is_found_by_trying(table: Capabilities) -> None:
    """Gloo, shared memory and round robin do every collective on the CPU; text, HTML and answers say the same."""
    for backend in ("gloo", "shm", "round_robin"):
        for operation in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send, recv"):
            assert table.works(operation, backend, "cpu"), str(table)
    assert ("shm", "cpu") in table.columns
    lines = str(table).splitlines()
    assert lines[0].split("  ")[-1].strip() == " ".join(table.columns[-1])
    marked = next(line for line in lines if line.startswith("all_reduce "))
    assert marked.count("✓") == sum(table.works("all_reduce", *column) for column in table.columns)
    assert table._repr_html_().count("<tr>") == len(table.operations) + 1
    with pytest.raises(ValueError, match="'sing' was not tried: choose one of send, recv"):
        table.works("sing", "gloo")


def test_what_is_not_there_says_why(table: Capabilities) -> None:
    """Each backend without a column has a reason, on each device."""
    tried = set(table.columns)
    for backend in ("gloo", "shm", "round_robin", "nccl", "mpi", "ucc"):
        for device in ("cpu", "cuda"):
            assert ((backend, device) in tried) != ((backend, device) in table.unavailable)
    if mpi.why_not():
        assert "apt install libopenmpi-dev" in table.unavailable["mpi", "cpu"]
    elif shutil.which("mpiexec") and mpi.ours():
        assert table.unavailable["mpi", "cuda"] == "MPI is used only for CPU tensors" or not torch.cuda.is_available()
        for operation in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send, recv"):
            assert table.works(operation, "mpi", "cpu"), str(table)
    if not torch.cuda.is_available():
        assert "shm on cuda" in str(table)
        assert table.unavailable["gloo", "cuda"] == "torch finds no GPU on this machine"
        assert not table.works("all_reduce", "gloo", "cuda")


def test_a_trial_that_is_too_slow_is_told() -> None:
    """Without time nothing is tried, and both processes are gone."""
    with pytest.raises(RuntimeError, match="nothing could be tried: no answer within the time limit"):
        capabilities(timeout_seconds=0)


def _trial_processes() -> dict[int, list[str]]:
    """Process id -> arguments of the ranks of a trial that this process has started."""
    found = {}
    for pid, command in processes().items():
        words = command.split()
        if "ddp_lab.comm.capability_trial" in words:
            at = words.index("ddp_lab.comm.capability_trial")
            found[pid] = words[at + 1 : at + 3]
    return found


@pytest.mark.soak
def test_an_operation_that_ends_the_process_costs_itself_alone() -> None:
    """A rank is killed in the middle of a trial: that operation does not work, all others are still tried."""
    killed = threading.Event()

    def kill_one() -> None:
        def chance() -> bool:
            for pid, (folder, rank) in _trial_processes().items():
                answers = Path(folder, "answers")
                if rank == "1" and answers.exists() and answers.read_text().count('"works"') > 5:
                    os.kill(pid, signal.SIGKILL)
                    killed.set()
            return killed.is_set()

        wait_until(chance, "a rank in the middle of its trial")

    thread = threading.Thread(target=kill_one)
    thread.start()
    found = capabilities()
    thread.join()
    assert killed.is_set()
    tried = [column for column in found.columns if column[1] == "cpu"]
    assert tried[:3] == [("gloo", "cpu"), ("shm", "cpu"), ("round_robin", "cpu")]
    told = [one for one in found if "ended the process with exit code -9" in one.why_not]
    assert len(told) <= 1  # it may have been between two
    for operation in capability_trial.OPERATIONS:
        assert len([one for one in found if (one.operation, one.backend) == (operation, "shm")]) == 1
        assert found.works(operation, "shm") or operation in [one.operation for one in told], str(found)


@contextmanager
def outside(rank: int, size: int, folder: str) -> Iterator[None]:
    """Without the default group, which is made again afterwards."""
    dist.destroy_process_group()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/afterwards", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _refused(group: Any, rank: int, make: Any) -> None:
    if rank == 1:
        raise NotImplementedError("not this one\nsecond line")


def _wrong(group: Any, rank: int, make: Any) -> Any:
    return make(1.0), 1.0 + rank


def _trial(rank: int, size: int, folder: str) -> None:
    operations = capability_trial.OPERATIONS
    capability_trial.OPERATIONS = {"refused": _refused, "wrong": _wrong, "all_reduce": operations["all_reduce"]}
    try:
        with outside(rank, size, folder):
            capability_trial._Trial(Path(folder), rank, ("shm", "round_robin")).run()
    finally:
        capability_trial.OPERATIONS = operations


def test_what_one_rank_refuses_does_not_work(ranks: Ranks, tmp_path: Path) -> None:
    """Its first line is the reason; a wrong result is one, too; the next operation gets a new group."""
    ranks(2, _trial, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    for backend in ("shm", "round_robin"):
        found = [line for line in lines if (line["backend"], line["device"]) == (backend, "cpu") and "works" in line]
        assert [(line["operation"], line["works"]) for line in found] == [
            ("refused", False),
            ("wrong", False),
            ("all_reduce", True),
        ]
        assert [line["why_not"] for line in found] == [
            "not this one",
            "the result is [1.0, 1.0, 1.0, 1.0], not 2.0",
            "",
        ]
