"""Cells as a script: what each becomes, which belong to it, and what the script says of itself."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from ddp_lab.cli import main
from ddp_lab.errors import DdpLabError
from ddp_lab.notebook.scripts import cells as cell_sources
from ddp_lab.notebook.scripts.cells import NotebookCell
from ddp_lab.notebook.scripts.export import ExportedScript, export
from ddp_lab.notebook.scripts.settings import StartSettings, settings_of

_RUFF = Path(sys.executable).with_name("ruff")


def _export(*texts: str, settings: StartSettings | None = None) -> ExportedScript:
    cells = [NotebookCell(text, f"cell {number}") for number, text in enumerate(texts, start=1)]
    made = export(cells, settings or StartSettings(), "train.ipynb", "train.py")
    compile(made.text, "train.py", "exec")
    return made


def _part(made: ExportedScript, name: str) -> str:
    """What a section of the script holds."""
    found = re.search(rf"^# %% {re.escape(name)}\n(.*?)(?=^# %% |\Z)", made.text, re.MULTILINE | re.DOTALL)
    assert found is not None, made.text
    return found[1].strip("\n")


def _cell(text: str) -> str:
    """What a single cell on all ranks becomes."""
    return _part(_export(f"%%distributed\n{text}"), "cell 1")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('a = 1  # one\n\n\ndef f():\n    return """\n  x\n"""',) * 2,  # as it is
        ("%time a = f(1)", "a = f(1)"),
        ("%%time\na = 1\nb = 2", "a = 1\nb = 2"),
        ("%%capture out\na = 1", "a = 1"),
        ("%env A=b c", "os.environ['A'] = 'b c'"),
        ("%cd some/where", "os.chdir('some/where')"),
        ("!ls -l", "subprocess.run('ls -l', shell=True)"),
        ("!echo {a}", "subprocess.run(f'echo {a}', shell=True)"),
        ("x = !ls", "x = subprocess.run('ls', shell=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()"),
        ("%%bash\necho $HOME", 'subprocess.run(["bash", "-c", \'echo $HOME\\n\'])'),
        ("for i in range(2):\n    %time f(i)", "for i in range(2):\n    f(i)"),
    ],
)
def test_a_cell_on_all_ranks_is_its_own_code(text: str, code: str) -> None:
    """Comments, blank lines and strings are kept; `%time`, `%env`, `%cd` and shell commands do what they do in a
    cell."""
    assert _cell(text) == code


@pytest.mark.parametrize(
    ("option", "condition"), [("0", "rank == 0"), ("0,2-3", "rank in (0, 2, 3)"), ("1-2", "rank in (1, 2)")]
)
def test_ranks_become_an_if(option: str, condition: str) -> None:
    """A cell with `--ranks` is inside an `if`, in which strings of several lines keep every character."""
    code = 'text = """\n  a\nb"""\nif text:\n    more = f"""{text}\n\tc"""\nlast = "d\\\ne"\nprint(rank)'
    made = _part(_export(f"%%distributed --ranks {option}\n{code}"), "cell 1")
    first, *_ = made.splitlines()
    assert first == f"if {condition}:"
    names: dict[str, Any] = {"rank": 0}
    exec(made.replace(condition, "True"), names)
    expected: dict[str, Any] = {"rank": 0}
    exec(code, expected)
    assert [names[name] for name in ("text", "more", "last")] == [expected[name] for name in ("text", "more", "last")]


def test_options_without_a_meaning_in_a_script_are_named() -> None:
    """What a script can't do is a comment above the cell's code."""
    made = _part(_export("%%distributed --timeout 5 --dashboard --no-wait --quiet --name fit\na = 1"), "cell 1: fit")
    *comments, code = made.splitlines()
    assert code == "a = 1"
    named = [re.findall(r"--[a-z-]+", line)[0] for line in comments]
    assert named == ["--timeout", "--dashboard", "--no-wait", "--quiet"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a = 1\n%timeit f(a)", "a = 1\n# not translated: %timeit f(a)"),
        ("a = 1\n!echo $a", "a = 1\n# not translated: !echo $a"),
        ("a = 1\n%pip install x", "a = 1\n# not translated: %pip install x"),
        ("if a:\n    %timeit f(a)", "if a:\n    pass  # not translated: %timeit f(a)"),
        ("x = %lsmagic\na = 1", "# not translated: %lsmagic\na = 1"),
    ],
)
def test_other_magics_become_comments(text: str, code: str) -> None:
    """What has no translation is a comment, and is reported."""
    made = _export(f"%%distributed\n{text}")
    assert _part(made, "cell 1") == code
    assert any("became a comment" in note for note in made.notes)


def test_await_at_the_top_runs_in_one_event_loop() -> None:
    """Variables of such a cell are global, as in the notebook, and later cells await on the same loop."""
    made = _export(
        "%%distributed\nasync def f(): return 3", "%%distributed\na = await f()\nfor i in range(2):\n    b = i"
    )
    assert _part(made, "cell 2").startswith("async def cell_2():\n    global a, i, b\n    a = await f()\n")
    names: dict[str, Any] = {"events": __import__("asyncio").new_event_loop()}
    exec(f"{_part(made, 'cell 1')}\n{_part(made, 'cell 2')}", names)
    names["events"].close()
    assert (names["a"], names["b"]) == (3, 1)


def test_imports_are_gathered_once_in_order() -> None:
    """Imports at the top of cells move to the top of the script; those in functions and `try` stay."""
    made = _export(
        "%%distributed\nfrom __future__ import annotations\nimport math  # why\nfrom torch import nn\na = math.pi",
        "%%distributed\nimport math; from torch import nn, optim\ndef f():\n    import json\n    return json\n"
        "try:\n    import tomllib\nexcept ImportError:\n    tomllib = None",
    )
    assert _part(made, "imports").splitlines() == [
        "import torch",
        "import torch.distributed as dist",
        "import math",
        "from torch import nn, optim",
    ]
    assert _part(made, "cell 1") == "a = math.pi"
    assert _part(made, "cell 2").startswith("def f():\n    import json")
    first = next(node for node in ast.parse(made.text).body)
    assert isinstance(first, ast.ImportFrom)
    assert first.module == "__future__"


@pytest.mark.parametrize(
    "cells",
    [
        ("import sys\nsys.path.insert(0, 'lib')", "import helper"),
        ("import os\nos.environ['A'] = '1'", "import helper"),
        ("helper = 1", "import helper"),
        ("import other as helper", "import helper"),
        ("%env A=1", "import helper"),
    ],
)
def test_an_import_stays_where_moving_it_would_change_it(cells: tuple[str, ...]) -> None:
    """An import stays below a line that it depends on, and where other code binds its name."""
    made = _export(*(f"%%distributed\n{cell}" for cell in cells))
    assert _part(made, "cell 2") == "import helper"
    assert "import helper" not in _part(made, "imports").splitlines()


def test_plain_cells_need_a_mark() -> None:
    """Plain cells are left out unless marked, and a mark leaves a cell on ranks out; both are counted or named. A cell
    that failed, that is not Python, or that ran on another cluster is left out, and the note says which."""
    made = _export(
        "%load_ext ddp_lab\n%cluster start -n 2",
        "a = 1",
        "# export\nb = 2\n%load_ext x",
        "%%distributed\nc = 3",
        "%%distributed\n# no export\nd = 4",
    )
    assert made.cells == 2
    assert _part(made, "cell 3") == "b = 2"
    assert "a = 1" not in made.text
    assert "d = 4" not in made.text
    assert made.notes == ("left out: 2 plain cells that do not begin with `# export`",)
    cells = [
        NotebookCell("%%distributed\na = 1", "cell 1"),
        NotebookCell("%%distributed\nb = 1", "cell 2", "it failed"),
        NotebookCell("%%distributed\nb = ", "cell 3"),
        NotebookCell("%%distributed --cluster two\nb = 1", "cell 4"),
        NotebookCell("%%distributed --frob\nb = 1", "cell 5"),
    ]
    made = export(cells, StartSettings(name="one"), "train.ipynb", "train.py")
    assert made.cells == 1
    assert made.notes[0] == "left out: cell 2 (it failed)"
    assert [note.partition(" (")[0] for note in made.notes] == [f"left out: cell {number}" for number in (2, 3, 4, 5)]
    with pytest.raises(DdpLabError, match=r"no cell to export; left out: cell 2 \(it failed\): run "):
        export(cells[1:2], StartSettings(), "train.ipynb", "train.py")


def test_pushes_become_assignments_on_all_ranks() -> None:
    """In a marked cell, `lab.push` and `%push` give every rank the values of rank 0; what `lab.run` runs is code. The
    notebook's object and the ranks' value of one name are two; the script has one namespace and keeps both."""
    made = _export(
        "# export\nx, y = 1, 2\nlab.push({'a': x, 'b': y})\n%push x y\nlab.run('c = a')\nlab.dashboard()",
        "%%distributed\nprint(a, b, c, x, y)",
    )
    assert _part(made, "cell 1").splitlines() == [
        "x, y = 1, 2",
        "a, b = pushed_by_rank_0((x, y))",
        "x, y = pushed_by_rank_0((x, y))",
        "c = a",
        "# not translated: lab.dashboard()",
    ]
    assert "def pushed_by_rank_0(values):" in made.text
    assert made.notes == ("cell 1: `lab.dashboard()` became a comment",)
    one = "# export\nfolder = Folder()\nlab.push({'folder': folder.name})"
    assert _part(_export(one), "cell 1").splitlines()[1] == (
        "folder_in_notebook, (folder,) = folder, [pushed_by_rank_0(folder.name)]"
    )
    two = "# export\nfolder, a = Folder(), 1\nlab.push({'a': a, 'folder': folder.name})"
    assert _part(_export(two), "cell 1").splitlines()[1] == (
        "folder_in_notebook, (a, folder) = folder, pushed_by_rank_0((a, folder.name))"
    )


def test_names_that_no_cell_defines_are_reported() -> None:
    """The names, and how to define them; not those of ranks, of Python, or those that functions read later. ddp_lab is
    imported only where it is used: a script of plain torch code with the backend gloo runs without it."""
    made = _export(
        "%%distributed\nprint(rank, world_size, device, local_rank, torch, dist, ddp_lab, late)\nx = len([])",
        "%%distributed\nlate = [y for y in 'ab']\ndef f():\n    return missing, later",
        "%%distributed\nlater = x",
    )
    assert made.notes == (
        "late and missing: no exported cell defines them before they are read; write `# export` in the first line of "
        "the plain cell that does",
    )
    assert "import ddp_lab" in _part(made, "imports").splitlines()
    made = _export("%%distributed\nx = 1", settings=StartSettings(backend="gloo"))
    assert "import ddp_lab" not in _part(made, "imports").splitlines()


def test_the_start_line_becomes_options() -> None:
    """`-n`, `--backend` and each `--env` are options of the script with the notebook's values as defaults."""
    start = "%load_ext ddp_lab\n%cluster start -n 4 --backend gloo --env A=1 --env backend=x --devices 0,2"
    cells = [NotebookCell(start, "cell 1"), NotebookCell("%%distributed\na = 1", "cell 2")]
    settings = settings_of(cells)
    assert (settings.n, settings.backend) == (4, "gloo")
    made = export(cells, settings, "train.ipynb", "train.py")
    assert made.command == "torchrun --standalone --nproc-per-node 4 train.py"
    assert f"#     {made.command}" in made.text.splitlines()
    options = _part(made, "ddp_lab: options, set before torch is imported")
    for option in ('"-n", type=int, default=4', '"--backend", default="gloo"', '"--A"', '"--env-backend"'):
        assert option in options
    assert 'os.environ["CUDA_VISIBLE_DEVICES"] = options.env_CUDA_VISIBLE_DEVICES' in options
    assert options.index("os.environ[") < made.text.index("import torch")
    far = StartSettings(n=8, hosts="a:4,b:4")
    assert _export("%%distributed\na = 1", settings=far).command.startswith("torchrun --nnodes 2 --nproc-per-node 4 ")


def test_the_script_passes_a_linter(tmp_path: Path) -> None:
    """Ruff's default rules accept the script of an ordinary notebook."""
    made = _export(
        "%%distributed\nimport math\nx = math.pi",
        "# export\ny = 2\nlab.push({'z': y})",
        "%%distributed --ranks 0\nprint(x, z)\ndisplay(x)",
        "%%distributed\nasync def f(): return 1\nw = await f()",
    )
    (tmp_path / "train.py").write_text(made.text)
    done = subprocess.run(
        [_RUFF, "check", "--isolated", "--select", "E4,E7,E9,F", tmp_path / "train.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


# -- where the cells come from


def _ran(shell: InteractiveShell, *cells: tuple[str, str]) -> None:
    for cell_id, text in cells:
        shell.run_cell(text, store_history=True, cell_id=cell_id)


@pytest.fixture
def shell() -> Any:
    """An IPython shell whose cells are noted."""
    made = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))  # no database of its own
    made.register_magic_function(lambda line, cell="": exec(cell, made.user_ns), "cell", "distributed")
    made.register_magic_function(lambda line: None, "line", "cluster")
    cell_sources.load(made)
    yield made
    cell_sources.unload(made)


@pytest.mark.filterwarnings("ignore")
def test_history_has_the_last_success_at_the_first_place(shell: InteractiveShell) -> None:
    """A cell that was edited and run again is there once; one that never succeeded is left out by name."""
    _ran(shell, ("a", "%%distributed\na = 1"), ("b", "%%distributed\n1 / 0"), ("c", "%%distributed\nc = 1"))
    _ran(shell, ("a", "%%distributed\na = 2"), ("d", "%%distributed\n2 / 0"), ("b", "%%distributed\nb = 1"))
    _ran(shell, ("c", "%%distributed\n3 / 0"))
    found = cell_sources.executed_cells()
    assert [(cell.text.split("\n")[1], cell.left_out) for cell in found] == [
        ("a = 2", ""),
        ("c = 1", ""),
        ("2 / 0", "it failed"),
        ("b = 1", ""),
    ]
    cell_sources.load(shell)  # %reload_ext
    every = [cell.text.split("\n")[1] for cell in cell_sources.executed_cells(every_run=True) if not cell.left_out]
    assert every == ["a = 1", "c = 1", "a = 2", "b = 1"]


@pytest.mark.filterwarnings("ignore")
def test_history_begins_at_the_last_restart(shell: InteractiveShell) -> None:
    """Cells on ranks before a stop or restart are left out, unless no cell has run on ranks since."""
    _ran(shell, ("a", "%%distributed\na = 1"), ("s", "%cluster stop"))
    assert [cell.left_out for cell in cell_sources.executed_cells() if "a = 1" in cell.text] == [""]
    _ran(shell, ("b", "%%distributed\nb = 1"))
    left_out = {cell.text.split("\n")[-1]: cell.left_out for cell in cell_sources.executed_cells()}
    assert left_out["a = 1"] == "it ran before the cluster was stopped or restarted"
    assert left_out["b = 1"] == ""


def _notebook(path: Path, *cells: dict[str, Any]) -> Path:
    full = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "id": f"c{index}", **cell}
        for index, cell in enumerate(cells)
    ]
    path.write_text(json.dumps({"cells": full, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_a_file_has_its_cells_and_their_outputs(tmp_path: Path) -> None:
    """Sources may be a text or lines; a cell with an error among its outputs is left out; text cells are none."""
    path = _notebook(
        tmp_path / "a.ipynb",
        {"source": ["%%distributed\n", "a = 1"]},
        {"source": "# text", "cell_type": "markdown"},
        {"source": "%%distributed\nb = 1", "outputs": [{"output_type": "error"}]},
        {"source": "%%distributed\nc = 1", "metadata": {"tags": ["raises-exception"]}},
    )
    found = cell_sources.read_cells(path)
    assert [(cell.name, cell.left_out) for cell in found] == [
        ("cell 1", ""),
        ("cell 2", "it failed"),
        ("cell 3", "it is tagged raises-exception"),
    ]


def test_a_notebook_may_be_a_text_of_jupytext(tmp_path: Path) -> None:
    """The blocks of a Markdown file and the sections of a script are cells, with their magics."""
    markdown = tmp_path / "a.md"
    markdown.write_text("# Title\n\n```python\n%%distributed\na = 1\n```\n\nwords\n\n```python\nb = 2\n```\n")
    assert [cell.text for cell in cell_sources.read_cells(markdown)] == ["%%distributed\na = 1", "b = 2"]
    script = tmp_path / "a.py"
    script.write_text("# %%\n# %%distributed\na = 1\n\n# %% [markdown]\n# words\n\n# %%\nb = 2\n")
    assert [cell.text for cell in cell_sources.read_cells(script)] == ["%%distributed\na = 1", "b = 2"]


def test_the_command_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ddp-lab export` reports what it wrote, and replaces a file only with --force; errors say what to do."""
    path = _notebook(tmp_path / "a.ipynb", {"source": "%%distributed\na = 1"})
    script = tmp_path / "a.py"
    assert main.main(["export", str(path), str(script)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"wrote {script} from 1 cell of a.ipynb; run it with\n    torchrun --standalone ")
    script.write_text("mine")
    assert main.main(["export", str(path), str(script)]) == 1
    assert "a.py exists: add --force to replace it, or give another name" in capsys.readouterr().err
    assert script.read_text() == "mine"
    assert main.main(["export", str(path), str(script), "--force"]) == 0
    assert "a = 1" in script.read_text()
    capsys.readouterr()
    assert main.main(["export", str(tmp_path / "none.ipynb"), str(script), "--force"]) == 1
    assert "none.ipynb does not exist" in capsys.readouterr().err
    (tmp_path / "bad.ipynb").write_text("{}")
    assert main.main(["export", str(tmp_path / "bad.ipynb"), str(script), "--force"]) == 1
    assert "bad.ipynb is not a notebook" in capsys.readouterr().err
