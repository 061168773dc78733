"""What a second user of the machine can do to a cluster: nothing, but for the ports that torch leaves open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Lab
from tests.ranks.harness import ROOT
from tests.security.looking import everything_in, listening, process_ids, run_folder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try it")
_STRANGER = Path(__file__).with_name("stranger.py")


def _try(become: bool = True, **given: Any) -> dict[str, str]:
    """What came of these attempts, as another user or as this one."""
    asked = {"folders": [], "files": [], "pids": [], "wire": None, "store": None, "ports": [], "become": become}
    done = subprocess.run(
        [sys.executable, str(_STRANGER)],
        input=json.dumps(asked | given, default=str),
        env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


@pytest.fixture
def segment(lab: Lab) -> Iterator[Path]:
    """A shared-memory segment that rank 0 has made as torch's data loaders do."""
    before = set(os.listdir("/dev/shm"))
    lab.run("import multiprocessing.shared_memory as m; shared = m.SharedMemory(create=True, size=64)", ranks=[0])
    (name,) = set(os.listdir("/dev/shm")) - before
    yield Path("/dev/shm", name)
    lab.run("shared.close(); shared.unlink()", ranks=[0])


def test_nothing_can_be_read_or_signalled(lab: Lab, segment: Path) -> None:
    """Another user reads no file, log, key, segment or variable of a cluster, and reaches none of its processes."""
    inside = list(everything_in(run_folder(lab)))
    given = {
        "folders": [path for path in inside if path.is_dir()],
        "files": [*(path for path in inside if path.is_file()), segment],
        "pids": list(lab.pids().values()),
    }
    told = _try(**given)
    assert len(told) > 40
    assert [name for name, what in told.items() if not what.startswith("refused: PermissionError")] == []
    own = _try(become=False, **given)
    assert [name for name, what in own.items() if not what.startswith("got")] == [], "the user itself may do it"


def test_the_wire_takes_nothing(lab: Lab) -> None:
    """What another user sends to the wire without a key changes nothing; the cluster goes on."""
    assert lab.wire is not None
    _try(wire=lab.wire.endpoint()["data"])
    assert [one.state for one in lab.timeline.ranks()] == ["idle", "idle"]
    lab.wire.check()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_torchs_ports_are_open_to_other_users(lab: Lab) -> None:
    """SECURITY.md says that TCPStore and Gloo let other users of the machine in: if they no longer do, change it."""
    processes = {name: pid for pid, name in process_ids(lab).items()}
    [store] = set(lab.values("import os; int(os.environ['MASTER_PORT'])").values())
    gloo = sorted(listening(processes["rank 1"]))
    told = _try(store=store, ports=gloo)
    assert told.pop("store") == "got: 'here'"
    assert gloo
    assert set(told.values()) == {"got: 'connected'"}
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
