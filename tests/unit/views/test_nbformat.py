"""A figure costs no two seconds of grammars."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
from ddp_lab.views.paint.figure import import_nbformat
import_nbformat()
assert "nbformat" in sys.modules
assert "rfc3987_syntax" not in sys.modules
import nbformat, plotly.io._renderers
nbformat.validate(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")]))
import rfc3987_syntax  # a program's own import works
import_nbformat()
assert sys.modules["rfc3987_syntax"] is rfc3987_syntax
"""


def test_grammars_are_left_out() -> None:
    """nbformat works without the grammars of addresses, plotly finds it, and who asks for the grammars gets them."""
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)
