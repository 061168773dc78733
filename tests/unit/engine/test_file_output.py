"""What is written to a process's files becomes text of its streams."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import io, os, sys
from ddp_lab.engine.cells.file_output import FileOutput
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
