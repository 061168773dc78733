"""Runs ipyparallel's controller so that it, and every process it forks, ends with the process that started it.

`python -m ddp_lab.engine.controller PARENT RUN_DIR [ipcontroller options]`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import socket
import sys

from . import watch

__all__: list[str] = []

_PORTS = 30  # ipcontroller takes nineteen


def hold_ports() -> list[socket.socket]:
    """Free TCP ports that nobody else is given while these sockets are open; ipcontroller may listen on them.

    Left to itself, it notes ports that are free and listens later: whoever took one meanwhile ends it, or silences a
    part of it. A socket that is bound and does not listen keeps a port from all others, but for listeners with
    SO_REUSEADDR, as ZeroMQ's are, where it has that option, too; it has it only once it holds the port.
    """
    held = [socket.socket() for _ in range(_PORTS)]
    for one in held:
        one.bind(("", 0))
    for one in held:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def main(argv: list[str]) -> None:
    """Watches the parent, then becomes ipcontroller."""
    run_dir, controller = argv[1], os.getpid()

    def end_now() -> None:
        shutil.rmtree(run_dir, ignore_errors=True)
        os._exit(1)

    def become_heart_monitor() -> None:
        watch.kill_with_parent_thread(controller)
        logging.disable(logging.WARNING)  # else every late heartbeat of a busy machine is two lines of log

    os.umask(0o077)  # ipyparallel writes some of its files for everybody; no code of the user runs here
    watch.on_parent_exit(int(argv[0]), end_now)
    os.register_at_fork(after_in_child=become_heart_monitor)
    # The heart monitor is a multiprocessing.Process: only a fork runs the hook above.
    multiprocessing.set_start_method("fork")
    from ipyparallel.controller.app import IPController

    held = hold_ports()
    ports = ",".join(str(one.getsockname()[1]) for one in held)
    IPController.launch_instance(argv=[*argv[2:], f"--IPController.ports={ports}"])


if __name__ == "__main__":
    main(sys.argv[1:])
