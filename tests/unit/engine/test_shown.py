"""What a rank's cells show: which frames are the user's own, and what is written to its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import IPython

_ASK = "from ddp_lab.diagnosis.stacks import is_users; import sys; print([is_users(file) for file in sys.argv[1:]])"


def test_libraries_that_are_installed_elsewhere(tmp_path: Path) -> None:
    """IPython in a folder of PYTHONPATH is a library, too; what lies beside it is the user's."""
    (tmp_path / "IPython").symlink_to(Path(IPython.__file__).parent)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    files = [str(tmp_path / name) for name in ("IPython/core/interactiveshell.py", "training.py")]
    asked = [sys.executable, "-c", _ASK, *files, "<cell 3>", os.__file__]
    done = subprocess.run(asked, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True, True, False]"


_PROGRAM = """
import io, os, sys
from ddp_lab.engine.cells.delivery import FileOutput
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)  # where nothing can be written
stream = io.StringIO()
files = FileOutput({1: stream})
for number in range(20):
    os.system(f"echo {number}")
    files.drain()
    assert stream.getvalue().endswith(f"{number}\\n"), stream.getvalue()
for half in "\u00e9".encode()[:1], "\u00e9".encode()[1:]:  # a character may come in two parts
    os.write(1, half)
    files.drain()
sys.stderr.write(ascii(stream.getvalue()[-3:]))
"""


def test_text_of_other_processes_is_complete_when_it_is_drained() -> None:
    """Each time, also if the file itself has no room, and across the border of two reads."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ascii("9\n\u00e9"))
