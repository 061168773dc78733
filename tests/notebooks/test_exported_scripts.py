"""Exported scripts under torchrun: the same parameters, bit for bit, as the notebook's cells on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_lab.notebook.scripts import export_notebook, import_script

from . import exporting, running

# Notebook -> global names that must be among the tensors of both.
TRAINED = {
    "notebooks/quickstart": ("model", "optimizer", "ours"),
    "notebooks/hosted": ("model",),
    "tutorials/05_data_parallel_in_fifty_lines": ("model",),
    "tutorials/06_buckets_and_overlap": ("two_ways",),
    "tutorials/07_unused_parameters_and_static_graph": ("model",),
    "tutorials/12_scaling": ("model", "models"),
    "tutorials/13_memory_and_speed": ("model",),
    "tutorials/15_fsdp2_and_when_ddp_is_not_enough": ("model",),
    "tutorials/A_data_parallel_from_the_inside": ("model",),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", TRAINED)
def test_notebooks_that_train_are_equal_bit_for_bit(name: str, tmp_path: Path) -> None:
    """All tensors of both ranks are equal at the end of a notebook, on a cluster and in its script."""
    cluster, script = exporting.compared(running.PROJECT / f"{name}.ipynb", tmp_path)
    names = {name.partition(": ")[2].partition("[")[0] for name in script}
    assert set(TRAINED[name]) <= names
    assert exporting.differing(cluster, script) == []


def test_a_script_does_what_its_notebook_does(tmp_path: Path) -> None:
    """`python train.py -n 2` starts the ranks itself, with one seed; options set threads and environment variables. A
    marked plain cell pushes the values of rank 0; `--ranks` and `await` do what they do in a notebook."""
    # Each line is written in one piece: the ranks write to one pipe.
    cells = [
        "%cluster start -n 1 --backend gloo --env A=1",
        "# export\nimport os\npid = os.getpid()\nlab.push({'first': pid})",
        "%%distributed\nfacts = [rank, world_size, dist.get_backend(), torch.get_num_threads(), os.environ['A']]\n"
        "print(f'{facts}\\n', end='')\nprint(f'drawn {torch.rand(1).item()}\\n', end='')",
        "%%distributed\nimport asyncio\nasync def later(x):\n    await asyncio.sleep(0)\n    return x",
        "%%distributed --ranks 1\nmine = await later(f'''a\n  b{rank}''')\nprint(f'{[mine]}\\n', end='')",
        "%%distributed\nprint('same\\n' if (first == pid) == (rank == 0) else 'not the same\\n', end='')",
    ]
    script = tmp_path / "train.py"
    exporting.write(cells, tmp_path / "train.ipynb")
    export_notebook(tmp_path / "train.ipynb", script)
    printed = exporting.run([sys.executable, str(script), "-n", "2", "--threads", "1", "--A", "b c"], tmp_path)
    lines = printed.splitlines()
    assert sorted(line for line in lines if "gloo" in line) == [f"[{rank}, 2, 'gloo', 1, 'b c']" for rank in range(2)]
    drawn = [line for line in lines if "drawn" in line]
    assert len(drawn) == 2
    assert len(set(drawn)) == 1, "as on a cluster, all ranks begin with one seed"
    assert lines.count("same") == 2
    assert "['a\\n  b1']" in lines
    assert "not the same" not in lines


def test_a_script_trains_the_same_after_a_round_trip(tmp_path: Path) -> None:
    """A script for torchrun, imported and run on a cluster, ends with the parameters that it has under torchrun; and so
    does the script that is exported from the notebook."""
    script, notebook, again = (tmp_path / name for name in ("train.py", "train.ipynb", "again.py"))
    script.write_text(exporting.SCRIPT)
    import_script(script, n=2)
    export_notebook(notebook, again)
    kept = {name: tmp_path / name for name in ("first", "cluster", "second")}
    for one in kept.values():
        one.mkdir()
    exporting.run_script(script, tmp_path, {"KEPT": str(kept["first"])})
    running.execute(running.read(notebook), tmp_path, running.KERNEL_ENVIRONMENT | {"KEPT": str(kept["cluster"])})
    exporting.run_script(again, tmp_path, {"KEPT": str(kept["second"])})
    first, cluster, second = map(exporting.loaded, kept.values())
    assert exporting.differing(cluster, first) == exporting.differing(cluster, second) == []
