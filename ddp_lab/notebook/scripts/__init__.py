"""A notebook's cells as a script for torchrun, and a script as a notebook.

`cells` says which cells there are and how they ended, `imports` gathers imports, `export` translates the cells and puts
the script together inside its `frame`. `split` makes cells of a script. `files` reads and writes.
"""

from . import cells
from .files import export_executed, export_notebook, import_script

__all__ = ["cells", "export_executed", "export_notebook", "import_script"]
