"""A script as cells: where they begin, what the cluster makes unnecessary, and the notebook that is written."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from ddp_lab.cli import main
from ddp_lab.errors import DdpLabError
from ddp_lab.notebook.scripts.cells import NotebookCell
from ddp_lab.notebook.scripts.export import export
from ddp_lab.notebook.scripts.settings import StartSettings
from ddp_lab.notebook.scripts.split import split

SCRIPT = '''#!/usr/bin/env python
"""Trains a model.

torchrun --nproc_per_node=4 train.py
"""
import argparse
import os

# for all
import torch
import torch.distributed as dist

LR = 0.1
NAME = "a"


# the model
class Net(torch.nn.Module):
    pass


def helper():
    """Text
  with its own indentation."""
    return 1


def main():
    parser = argparse.ArgumentParser()
    args = parser.parse_args()
    dist.init_process_group("gloo")
    text = """
kept
"""
    # epochs
    for epoch in range(3):
        helper()
    if args:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def _texts(script: str) -> list[str]:
    return [cell.text for cell in split(script, "train.py").cells]


def test_a_script_is_split_at_its_natural_places() -> None:
    """Docstring, imports, constants, each definition, and the body of main() before, in and after its loop."""
    made = split(SCRIPT, "train.py")
    assert (made.n, made.backend) == (4, "gloo")
    assert [cell.markdown for cell in made.cells] == [True] + [False] * 7
    texts = [cell.text for cell in made.cells]
    assert texts[0].startswith("Trains a model.")
    assert texts[1] == "import argparse\nimport os\n\n# for all\nimport torch\nimport torch.distributed as dist"
    assert texts[2] == 'LR = 0.1\nNAME = "a"'
    assert texts[3] == "# the model\nclass Net(torch.nn.Module):\n    pass"
    assert texts[4].startswith("def helper():")
    assert '    """Text\n  with its own indentation."""' in texts[4]
    assert texts[5] == 'parser = argparse.ArgumentParser()\nargs = parser.parse_args([])\ntext = """\nkept\n"""'
    assert texts[6] == "# epochs\nfor epoch in range(3):\n    helper()"
    assert texts[7] == "if args:\n    pass  # the cluster has done this: destroy_process_group"


@pytest.mark.parametrize(
    "main_function",
    [
        "def main(a=1):\n    x = 1",
        "def main():\n    return 1",
        "def main():\n    global x\n    x = 1",
        "def main(): x = 1",
    ],
)
def test_a_main_function_that_needs_to_be_one_is_called(main_function: str) -> None:
    """A function with arguments, with `return` or with `global` stays a function, and its call is a cell."""
    script = f'{main_function}\n\nif __name__ == "__main__":\n    # run\n    main()\n'
    assert _texts(script) == [main_function, "# run\nmain()"]


def test_main_programs_and_markers() -> None:
    """Its statements are moved to the left; definitions above it stay. Where there are `# %%` lines, they alone divide;
    text cells are recognised."""
    script = 'def f():\n    pass\n\nif __name__ == "__main__":\n    a = 1\n    f()\n    while a:\n        a -= 1\n'
    assert _texts(script) == ["def f():\n    pass", "a = 1\nf()", "while a:\n    a -= 1"]
    script = "import a\n# %% one\nb = 1\nfor i in b:\n    pass\n#%% [markdown]\n# # Title\n# words\n# %%\nc = 1\n"
    made = split(script, "train.py").cells
    assert [(cell.text, cell.markdown) for cell in made] == [
        ("import a", False),
        ("b = 1\nfor i in b:\n    pass", False),
        ("# Title\nwords", True),
        ("c = 1", False),
    ]


def test_an_exported_script_comes_back() -> None:
    """Export and import give the cells back, without what the cluster does, with its number of ranks and options."""
    cells = ["import math\n\na = math.pi", "b = a\nprint(rank)"]
    settings = StartSettings(n=3, backend="gloo", env={"A": "x y"})
    notebook = [NotebookCell(f"%%distributed\n{text}", f"cell {number}") for number, text in enumerate(cells)]
    made = split(export(notebook, settings, "a.ipynb", "a.py").text, "a.py")
    assert (made.n, made.backend, made.env) == (3, "gloo", {"A": "x y"})
    assert [cell.text for cell in made.cells] == [
        "import torch\nimport torch.distributed as dist\nimport math",
        "a = math.pi",
        "b = a\nprint(rank)",
    ]


def test_what_a_reader_must_change_is_reported() -> None:
    """Scripts that start their own processes or read their own path need a hand; a script with an error is refused."""
    notes = split("import torch\ntorch.multiprocessing.spawn(f, nprocs=2)\nprint(__file__)\n", "train.py").notes
    assert [note.partition(" ")[2].partition(" ")[0] for note in notes] == ["2", "3"]
    with pytest.raises(DdpLabError, match=r"train.py, line 2: .*; fix the script, then import it again"):
        split("a = 1\nb =\n", "train.py")


def test_the_command_writes_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ddp-lab import` writes a valid notebook that loads the extension, starts the ranks and runs the cells there."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main.main(["import", str(script)]) == 0
    written = tmp_path / "train.ipynb"
    assert f"wrote {written}: 7 `%%distributed` cells; open it in JupyterLab" in capsys.readouterr().out
    notebook = nbformat.reads(written.read_text(), as_version=4)
    nbformat.validate(notebook)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert sources[:2] == ["%load_ext ddp_lab", "%cluster start -n 4 --backend gloo"]
    assert all(source.startswith("%%distributed\n") for source in sources[2:])
    assert main.main(["import", str(script)]) == 1
    assert "train.ipynb exists: add --force to replace it" in capsys.readouterr().err
    assert main.main(["import", str(script), "--force", "-n", "2", "--output", str(tmp_path / "b.ipynb")]) == 0
    assert (
        "%cluster start -n 2 --backend gloo" in json.loads((tmp_path / "b.ipynb").read_text())["cells"][2]["source"][0]
    )
    assert main.main(["import", str(tmp_path / "none.py")]) == 1
    assert "none.py does not exist: give a Python script" in capsys.readouterr().err
