"""The controller's process, and that of a host's server, without a cluster around them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddp_lab import machine
from ddp_lab.cluster.processes.launchers import Controller
from ddp_lab.engine.processes import host_server
from ddp_lab.engine.processes.controller import hold_ports
from tests.security.looking import listening
from tests.waiting import DEADLINE_S, wait_until


def test_ports_are_held() -> None:
    """Nobody else gets a held port, another holder neither; a listener that reuses addresses, as ZeroMQ's, does."""
    with contextlib.ExitStack() as stack:
        ports, others = ([stack.enter_context(one).getsockname()[1] for one in hold_ports()] for _ in range(2))
        assert len({*ports, *others}) == len(ports) + len(others)
        for port in ports:
            with socket.socket() as plain, pytest.raises(OSError, match="in use"):
                plain.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
                pass


def test_a_folder_that_is_still_written_to_is_removed(tmp_path: Path) -> None:
    """A process that ends, and makes files until then, leaves nothing of the folder."""
    folder = tmp_path / "folder"
    (folder / "some").mkdir(parents=True)
    code = f"""if True:
        import itertools, pathlib, threading
        from ddp_lab.engine.processes import parent_watch as watch
        threading.Timer(0.1, watch.end_and_remove, ["{folder}"]).start()
        for number in itertools.count():
            pathlib.Path("{folder}/some", str(number)).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path("{folder}/some", str(number)).touch()
    """
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_a_controller_and_its_successor(tmp_path: Path, address: str | None) -> None:
    """A successor of a killed controller listens where that did, with the same key; on ports only for other hosts, and
    who says nothing there is soon sent away."""
    controller = Controller(tmp_path)
    controller.start(address)
    try:
        pid = wait_until(lambda: controller.pid, "its process")
        with Mute(pid) as mute:
            wait_until(lambda: (mute.connect(), controller.connection())[1], "the controller")
            before = controller.connection()
            assert before["client"]["interface"] == f"ipc://{tmp_path}/c"
            wait_until(lambda: reached(tmp_path / f"c:{before['client']['mux']}"), "the controller's last socket")
            wait_until(lambda: mute.connect() == (0 if address is None else 7), "the ports")
            mute.wait_until_closed()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: controller.ended, "its end")
        assert controller.ended == "the controller was killed by SIGKILL (signal 9)"
        controller.start_again()
        registration = Path(
            f"{before['client']['interface'].removeprefix('ipc://')}:{before['client']['registration']}"
        )
        wait_until(lambda: reached(registration), "its successor")
        assert controller.connection() == before
    finally:
        controller.stop()
    assert "xhausted" not in (tmp_path / "controller.log").read_text()


class Mute(contextlib.ExitStack):
    """Connections that say nothing, to each port of a process from the moment that it listens there."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid
        self.made: dict[int, socket.socket] = {}

    def connect(self) -> int:
        """Connects to the ports that are new; returns how many there are."""
        for port in listening(self.pid).keys() - self.made.keys():
            self.made[port] = self.enter_context(socket.create_connection(("127.0.0.1", port), 25))
        return len(self.made)

    def wait_until_closed(self) -> None:
        """A connection that doesn't shake hands is closed within seconds: ZeroMQ would keep it for thirty."""
        for one in self.made.values():
            while one.recv(1024):
                pass


def reached(path: Path) -> bool:
    """Whether somebody listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(str(path)) == 0


def test_a_long_path_for_files(tmp_path: Path) -> None:
    """Where the temporary folder's path leaves no room for sockets, a cluster's folder is in /tmp."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    code = "from ddp_lab.cluster.processes.launchers import make_run_dir; print(made := make_run_dir()); made.rmdir()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("/tmp/ddp_lab-")
    assert not list(long.iterdir())


def test_a_link_in_the_way_of_a_host_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to nowhere in the place of a former server's folder, which anybody can make, saves no server."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as former:
        Path(tmp_path, f"ddp_lab-{former.pid}-evil").symlink_to("/nowhere")
        Path(tmp_path, f"ddp_lab-{former.pid}-files").mkdir()
        host_server._end_former({"pid": former.pid, "started": machine.started(former.pid)})
        assert former.wait(DEADLINE_S) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [f"ddp_lab-{former.pid}-evil"]
