"""A notebook's kernel that prepares its cluster while it starts: `python -m ddp_lab.notebook.kernel -f FILE`.

It is ipykernel's. What `%load_ext ddp_lab` would start (see [Note: zygote]) starts with it, and has imported
torch when the first cell asks for a cluster.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Starts the zygote, then the kernel, whose own imports don't come from the notebook's folder."""
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # IPython puts it back for cells
    from ..cluster.processes import zygote

    zygote.begin()
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()


if __name__ == "__main__":
    main()
