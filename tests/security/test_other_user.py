"""What a second user of the machine can do to a cluster: nothing, but for the ports that torch leaves open."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.cluster.processes import zygote
from ddp_lab.engine.groups.registry import sockets
from tests.cluster.conftest import Lab
from tests.ranks.harness import ROOT
from tests.security.looking import everything_in, listening, process_ids, run_folder
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to try it")
_STRANGER = Path(__file__).with_name("stranger.py")


def _try(become: bool = True, **given: Any) -> dict[str, str]:
    """What came of these attempts, as another user or as this one."""
    asked = {"wire": None, "become": become} | {name: [] for name in ("folders", "files", "pids", "ports", "sockets")}
    done = subprocess.run(
        [sys.executable, str(_STRANGER)],
        input=json.dumps(asked | given, default=str),
        env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, check=False,
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
    """What another user sends to the wire without a key changes nothing; the cluster goes on. On one machine nobody
    else even reaches its socket, nor those of the controller."""
    _try(wire=lab.wire.endpoint()["data"])
    sockets = [path for path in everything_in(run_folder(lab)) if path.is_socket()]
    assert len(sockets) > 10
    told = _try(sockets=sockets)
    assert len(told) == len(sockets)
    assert [name for name, what in told.items() if not what.startswith("refused: PermissionError")] == []
    assert set(_try(become=False, sockets=sockets).values()) == {"got: 'connected'"}
    assert [one.state for one in lab.timeline.ranks()] == ["idle", "idle"]
    lab.wire.check()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_torchs_ports_are_sealed(lab: Lab) -> None:
    """TCPStore's port and those of Gloo, of groups that the user makes, too, take nobody once the ranks are connected:
    nor after a rejoin."""
    lab.run("more = dist.new_group()")
    for rejoin in (lambda: None, lab.rejoin):
        rejoin()
        processes = {name: pid for pid, name in process_ids(lab).items()}
        ports = sorted({port for rank in ("rank 0", "rank 1") for port in listening(processes[rank])})
        assert len(ports) >= 5
        told = _try(ports=ports)
        assert {what.partition(":")[0] for what in told.values()} == {"refused"}
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}
    lab.run("del more")


def test_who_came_before_the_seal_is_sent_away() -> None:
    """A connection that another user opened before a port was sealed is shut down, one of this user goes on."""
    code = "import os, socket, sys; socket.getaddrinfo('127.0.0.1', 0); os.setuid(65534)\n" + (
        "with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as one:\n"
        "    print('in', flush=True); print(one.recv(1), flush=True)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        port = server.getsockname()[1]
        own = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        accepted, _ = server.accept()
        stack.enter_context(accepted)
        command = [sys.executable, "-c", code, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout.readline() == "in\n"
            stack.enter_context(server.accept()[0])
            assert sockets.seal(port) == ""
            assert stranger.stdout.readline() == "b''\n"
        own.sendall(b"x")
        assert accepted.recv(1) == b"x"
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.5)


def test_a_port_that_cannot_be_sealed_is_told() -> None:
    """Where the kernel lets no filter be put on a socket (here: it is locked), one is told why, and it stays open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.setsockopt(socket.SOL_SOCKET, 44, 1)  # SO_LOCK_FILTER
        assert sockets.seal(port) == "Operation not permitted"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_a_port_of_the_users_own_stays_open(lab: Lab) -> None:
    """What a rank's own code listens on while it makes groups lets everybody in."""
    lab.run("import socket; own = socket.create_server(('127.0.0.1', 0)); more = dist.new_group()")
    ports = lab.values("own.getsockname()[1]")
    assert set(_try(ports=list(ports.values())).values()) == {"got: 'connected'"}
    lab.run("own.close(); del more")


@pytest.mark.soak
def test_an_offered_zygote_serves_its_user_alone() -> None:
    """Even where its folder lets everybody in, who connects as another user is hung up on, and this user is not."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a worker's own lets nobody in
    folder.chmod(0o755)
    offered = zygote.offer(folder, {})
    try:
        listens = wait_until(lambda: next(folder.glob("zygote"), None), "the zygote")
        wait_until(lambda: listens.is_socket(), "its socket")
        listens.chmod(0o777)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
            wait_until(lambda: own.connect_ex(str(listens)) == 0, "that it listens")
            code = (
                "import os, socket, sys; os.setuid(65534); one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)"
            )
            code += "; one.connect(sys.argv[1]); print('in', one.recv(1))"
            done = subprocess.run([sys.executable, "-c", code, str(listens)], capture_output=True, text=True)
            assert done.stdout == "in b''\n", done.stderr
            with pytest.raises(BlockingIOError):
                own.recv(1, socket.MSG_DONTWAIT)
    finally:
        offered.kill()
        offered.wait()
        shutil.rmtree(folder)
