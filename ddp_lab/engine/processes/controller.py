"""Runs ipyparallel's controller so that it, and every process it forks, ends with the process that started it.

`python -m ddp_lab.engine.processes.controller PARENT RUN_DIR [ipcontroller options]`.

[Note: a controller that takes over]
A killed controller gets a successor without much disturbance: started again with the same folder, it listens at the
same addresses with the same keys and knows the registered engines, whose sockets reconnect by themselves. So it keeps
its secret key in a file of its folder, and its socket names are increasing numbers, so that a successor can choose
unused ones. Requests of ipyparallel inside the killed process, or made before all have reconnected, are lost.
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import psutil

from ...machine import no_collector
from . import parent_watch

# And the signal's number: the exit code then; `ddp_lab.cluster.processes.launchers` knows it.
HEART_MONITOR_KILLED = 128
_PORTS = 20  # engines of other hosts connect to nine
_FILES = 65_536  # at most: every connection to a port opens some in this process
_HANDSHAKE_MS = 3_000  # until a silent connection is closed
_NAMES_OF_A_SUCCESSOR = 1_000


def hold_ports() -> list[socket.socket]:
    """Free TCP ports that stay reserved while these sockets are open; ipcontroller may listen on them.

    By itself, ipcontroller picks free ports and listens later: a process that takes one meanwhile breaks all or part of
    it. A socket that is bound but does not listen reserves a port, except for listeners with SO_REUSEADDR, as
    ZeroMQ's are, if it has that option too; it gets the option only once it holds the port.
    """
    held = [socket.socket() for _ in range(_PORTS)]
    for one in held:
        one.bind(("", 0))
    for one in held:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def _keys(folder: Path) -> dict[str, bytes]:
    """The controller's CurveZMQ keys: those of its predecessor if there was one."""
    import zmq

    path = folder / "keys.json"
    if path.exists():
        found = json.loads(path.read_text())
    else:
        public, secret = zmq.curve_keypair()
        found = {"curve_publickey": public.decode(), "curve_secretkey": secret.decode()}
        path.write_text(json.dumps(found))
    return {name: key.encode() for name, key in found.items()}


def _open_more_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _close_copies() -> None:
    """Closes the connections that a forked process has inherited: they would outlive the controller's end of them."""
    for one in psutil.Process().net_connections(kind="tcp"):
        if one.raddr:
            os.close(one.fd)


def _hub_class(app: Any) -> Any:
    class Hub(app.Hub):  # type: ignore[misc]
        """ipyparallel's hub, which stores its engines for a successor completely or not at all, e.g. on a full disk."""

        def _save_engine_state(self) -> None:
            if not self.engine_state_file:
                return
            path = Path(self.engine_state_file)
            draft = path.with_suffix(".draft")
            engines = {number: engine.uuid for number, engine in self.engines.items()}
            try:
                draft.write_text(json.dumps({"engines": engines, "next_id": self._idcounter}))
                draft.replace(path)
            except OSError as error:
                self.log.warning("could not store the list of engines: %s", error)

    return Hub


def _controller_class() -> Any:
    from ipyparallel.controller import app

    app.Hub = _hub_class(app)

    class Controller(app.IPController):  # type: ignore[misc]
        """ipcontroller, which also works through Unix sockets, and ends when its heart monitor does."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._names = itertools.count(1)

        def load_secondary_config(self) -> None:
            security = Path(self.profile_dir.security_dir)
            self.reuse_files = self.restore_engines = (security / self.client_json_file).exists()
            if self.reuse_files:
                self._names = itertools.count(_NAMES_OF_A_SUCCESSOR)
            super().load_secondary_config()

        def next_port(self, pool_name: str = "common") -> int:
            transports = {"engine": self.engine_transport, "client": self.client_transport}
            if transports.get(pool_name, "ipc") == "ipc":
                return next(self._names)
            return int(super().next_port(pool_name))

        def construct_url(self, kind: str, channel: str, index: Any = None) -> str:
            # As engines and clients make them; nothing inside the controller needs a port.
            info = {"engine": self.engine_info, "client": self.client_info, "internal": self.internal_info}[kind]
            interface = self.client_info["interface"] if kind == "internal" else info["interface"]
            number = info[channel] if index is None else info[channel][index]
            return f"{interface}:{number}"

        def start(self) -> None:
            self.loop.add_callback(
                lambda: self.loop.add_handler(self.heartmonitor_process.sentinel, self._heart_monitor_ended, 1)
            )
            super().start()

        def _heart_monitor_ended(self, *_: object) -> None:
            self.heartmonitor_process.join()
            code = self.heartmonitor_process.exitcode
            self.log.critical("the heart monitor ended (exit code %s)", code)
            os._exit(HEART_MONITOR_KILLED - code if code < 0 else 1)

    return Controller


def main(argv: list[str]) -> None:
    """Watches the parent, then becomes ipcontroller."""
    run_dir, controller = argv[1], os.getpid()

    def become_heart_monitor() -> None:
        parent_watch.kill_with_parent_thread(controller)
        _close_copies()
        logging.disable(logging.WARNING)  # else every late heartbeat of a busy machine is two lines of log

    os.umask(0o077)  # ipyparallel writes some world-readable files; no user code runs here
    parent_watch.on_parent_exit(int(argv[0]), lambda: parent_watch.end_and_remove(run_dir))
    _open_more_files()
    os.register_at_fork(after_in_child=become_heart_monitor)
    # The heart monitor is a multiprocessing.Process: only a fork runs the hook above.
    multiprocessing.set_start_method("fork")
    with no_collector():
        import zmq

        controller_class = _controller_class()
    options = argv[2:]
    if "--IPController.engine_transport=tcp" in options:
        zmq.Context.instance().sockopts[zmq.HANDSHAKE_IVL] = _HANDSHAKE_MS
        held = hold_ports()
        options.append(f"--IPController.engine_ports={','.join(str(one.getsockname()[1]) for one in held)}")
    controller_class.launch_instance(argv=options, **_keys(Path(run_dir)))


if __name__ == "__main__":
    main(sys.argv[1:])
