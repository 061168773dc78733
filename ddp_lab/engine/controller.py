"""Runs ipyparallel's controller so that it, and every process it forks, ends with the process that started it.

`python -m ddp_lab.engine.controller PARENT RUN_DIR [ipcontroller options]`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import sys

from . import watch

__all__: list[str] = []


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

    IPController.launch_instance(argv=argv[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
