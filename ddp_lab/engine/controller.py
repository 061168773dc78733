"""Runs ipyparallel's controller so that it, and every process it forks, ends with the process that started it.

`python -m ddp_lab.engine.controller PARENT RUN_DIR [ipcontroller options]`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from . import watch

__all__: list[str] = []


def main(argv: list[str]) -> None:
    """Watches the parent, then becomes ipcontroller."""
    watch.on_parent_exit(int(argv[0]), lambda: os._exit(1))
    controller = os.getpid()
    os.register_at_fork(after_in_child=lambda: watch.kill_with_parent_thread(controller))
    # The heart monitor is a multiprocessing.Process: only a fork runs the hook above.
    multiprocessing.set_start_method("fork")
    from ipyparallel.controller.app import IPController

    IPController.launch_instance(argv=argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
