"""`%cluster export` and `%cluster import` in a real kernel, with the cells that have run there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.pages import Notebook, notebook_with_cluster


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """A kernel with a cluster of two ranks."""
    options, marked = "-n 2 --backend gloo --env A=b", "# export\nimport math\nhalf = math.pi / 2"
    with notebook_with_cluster(options, before=[marked]) as (kernel, _):
        yield kernel


def test_what_has_run_is_written(notebook: Notebook, tmp_path: Path) -> None:
    """Cells that succeeded are in the script, also a marked one before the extension was loaded; others are named."""
    notebook.run("%%distributed\nfirst = half = 1")
    failed = notebook.run("%%distributed\n1 / 0")
    assert failed.status == "error"
    notebook.run("%%distributed --ranks 1\nprint(first)")
    script = tmp_path / "train.py"
    shown = notebook.run(f"%cluster export {script}")
    assert shown.status == "ok", shown.error
    assert shown.text.splitlines()[:2] == [
        f"wrote {script} from 3 cells of this notebook; run it with",
        "    torchrun --standalone --nproc-per-node 2 train.py",
    ]
    assert "it failed" in shown.text
    text = script.read_text()
    compile(text, "train.py", "exec")
    assert "half = math.pi / 2" in text
    assert "first = half = 1" in text
    assert "1 / 0" not in text
    assert "if rank == 1:\n    print(first)" in text
    assert '"--A", dest="env_A", default=\'b\'' in text


def test_errors_and_the_way_back(notebook: Notebook, tmp_path: Path) -> None:
    """A missing notebook and an existing file are refused in a sentence; an import reports what it wrote."""
    script = tmp_path / "train.py"
    refused = notebook.run(f"%cluster export {script} --notebook nowhere.ipynb")
    assert "UsageError: %cluster export: nowhere.ipynb does not exist: give the file of a notebook" in refused.text
    script.write_text("print(1)\n")
    refused = notebook.run(f"%cluster export {script}")
    assert f"{script} exists: add --force to replace it, or give another name" in refused.text
    shown = notebook.run(f"%cluster import {script} -n 3")
    written = tmp_path / "train.ipynb"
    assert shown.text.strip() == f"wrote {written}: 1 `%%distributed` cell; open it in JupyterLab"
    assert "%cluster start -n 3" in written.read_text()
