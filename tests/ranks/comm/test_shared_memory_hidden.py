"""Ranks that can't open each other's memory through /proc: they share memory that has a name for a moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddp_lab import documentation, native
from tests.waiting import DEADLINE_S

HIDDEN_RANK = Path(__file__).parents[1] / "programs" / "hidden_rank.py"
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@contextmanager
def _ranks(size: int, how: str) -> Iterator[list[subprocess.Popen[str]]]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    before = NAMESPACE if how == "namespace" else []
    ranks = [
        subprocess.Popen(
            [*before, sys.executable, str(HIDDEN_RANK), str(rank), str(size), str(store.port), how],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def _named() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("ddp_lab-")}


@pytest.mark.parametrize("how", ["user", "namespace"])
def test_hidden_ranks_share_memory_all_the_same(how: str) -> None:
    """Rank 0 says so once, no name is left while they use it, and a death is told."""
    if how == "namespace" and subprocess.run([*NAMESPACE, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("may make no process namespace")
    before = _named()
    with _ranks(2, how) as ranks:
        told = []
        for process in ranks:
            assert process.stdout is not None
            told.append(json.loads(process.stdout.readline()))
        assert [(backend, looked) for backend, looked, _, _ in told] == [("shm", False)] * 2
        [said] = told[0][3]
        assert said.startswith("shm: ")
        assert said.endswith(
            f"; this group's memory is in /dev/shm, and its tensors are copied\n{documentation.more('shm-falls-back')}"
        )
        assert told[1][3] == []
        if how == "namespace":
            assert {process for _, _, process, _ in told} == {1}
        assert _named() <= before
        ranks[1].send_signal(signal.SIGKILL)
        text, _ = ranks[0].communicate(timeout=DEADLINE_S)
        assert "shm: rank 1 ended" in text


def test_named_memory_of_another_kind_is_refused() -> None:
    """Of another size, open to other users, or made twice."""
    C: Any = native.load()
    name = f"/ddp_lab-{os.getpid()}"
    made = C.Segment.create_named(name, 8192)
    try:
        with pytest.raises(RuntimeError, match="is not a segment of this group"):
            C.Segment.attach_named(name, 4096)
        with pytest.raises(RuntimeError, match="File exists"):
            C.Segment.create_named(name, 8192)
        os.fchmod(made.descriptor, 0o640)
        with pytest.raises(RuntimeError, match="is not a segment of this group"):
            C.Segment.attach_named(name, 8192)
        if os.geteuid() == 0:
            os.fchmod(made.descriptor, 0o600)
            os.fchown(made.descriptor, 65534, 65534)
            with pytest.raises(RuntimeError, match="is not a segment of this group"):
                C.Segment.attach_named(name, 8192)
    finally:
        C.Segment.unlink(name)
    C.Segment.unlink(name)  # another rank may be the first
    with pytest.raises(RuntimeError, match="posix_fallocate"):
        C.Segment.create_named(name, 1 << 60)
    assert name[1:] not in os.listdir("/dev/shm")
