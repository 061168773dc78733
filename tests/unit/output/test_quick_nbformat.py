"""A figure costs no two seconds of grammars."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
from ddp_lab.output import quick_nbformat
quick_nbformat.install()
import nbformat
assert "nbformat" in sys.modules
assert "rfc3987_syntax" not in sys.modules
import plotly.io._renderers, importlib.resources
nbformat.validate(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")]))
import rfc3987_syntax  # a program's own import works
assert importlib.resources.files("nbformat").joinpath("v4").is_dir()
assert nbformat.__spec__.loader is nbformat.__loader__
assert sys.modules["rfc3987_syntax"] is rfc3987_syntax
"""


def test_grammars_are_left_out() -> None:
    """nbformat works without the grammars of addresses, plotly finds it, and who asks for the grammars gets them."""
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)
