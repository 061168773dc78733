"""Which frames of a traceback are the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import IPython

_ASK = (
    "from ddp_lab.engine.cells.tracebacks import is_users; import sys; print([is_users(file) for file in sys.argv[1:]])"
)


def test_libraries_that_are_installed_elsewhere(tmp_path: Path) -> None:
    """IPython in a folder of PYTHONPATH is a library, too; what lies beside it is the user's."""
    (tmp_path / "IPython").symlink_to(Path(IPython.__file__).parent)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    files = [str(tmp_path / name) for name in ("IPython/core/interactiveshell.py", "training.py")]
    asked = [sys.executable, "-c", _ASK, *files, "<cell 3>", os.__file__]
    done = subprocess.run(asked, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True, True, False]"
