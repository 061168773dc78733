"""Exported scripts under torchrun: the same parameters, bit for bit, as the notebook's cells on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddp_lab.notebook.scripts import export_notebook, import_script

from . import exporting, running

_TRAIN_AGAIN = "%%distributed\ntorch.manual_seed(0)\nloss = train(24)"
# The paper's notebooks, without the benchmark: it trains in the library's own code.
_WITHOUT_BENCHMARK = {"measure": "", "figure": "", "numbers": ""}
# The cell that hangs on purpose, without its loop: a later cell needs its batches.
_WITHOUT_HANG = """%%distributed
torch.manual_seed(0)
batches = [torch.ones(1, 1)] * (5 if rank == 0 else 3)
model = ddp_lab.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))"""


@dataclass(frozen=True)
class Trained:
    """A notebook that trains.

    Attributes:
        path: its file, relative to the project.
        models: global names that must be among the tensors of both.
        marked: ids of plain cells that the ranks' cells need: they get the mark `# export`.
        omitted: ids of cells on ranks that run until the client interrupts them, or need what the client does to the
            cluster; they get the mark `# no export`.
        added: a cell that trains, for a notebook in which the client starts the training.
        seeded: ids of cells that draw numbers without a seed: they get one.
        sources: other texts of cells, by ids: smaller benchmarks.
        ignored: global names that only the omitted cells or the client set or change.
    """

    path: str
    models: tuple[str, ...]
    marked: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    added: str = ""
    seeded: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


TRAINED = [
    Trained("notebooks/quickstart.ipynb", ("model", "optimizer", "ours")),
    Trained("notebooks/hosted.ipynb", ("model",)),
    Trained("notebooks/paper_convergence.ipynb", ("network",), sources=_WITHOUT_BENCHMARK),
    Trained("notebooks/paper_overlap.ipynb", ("model",), sources=_WITHOUT_BENCHMARK),
    Trained("tutorials/04_from_one_process_to_n.ipynb", ("model", "networks"), marked=("start", "pictures")),
    Trained("tutorials/05_data_parallel_in_fifty_lines.ipynb", ("model",)),
    Trained("tutorials/06_buckets_and_overlap.ipynb", ("two_ways",)),
    Trained("tutorials/07_unused_parameters_and_static_graph.ipynb", ("model",)),
    Trained(
        "tutorials/08_accumulation_and_uneven_inputs.ipynb",
        ("model", "wide"),
        seeded=("measure",),
        sources={"hang": _WITHOUT_HANG},
    ),
    Trained("tutorials/09_comm_hooks.ipynb", ("model",), omitted=("live",), ignored=("wide", "optimizer", "step")),
    Trained("tutorials/12_scaling.ipynb", ("model", "models")),
    Trained("tutorials/13_memory_and_speed.ipynb", ("model",)),
    Trained(
        "tutorials/14_the_training_that_got_slower.ipynb",
        ("model", "optimizer"),
        marked=("solution-3",),
        omitted=("parts", "option"),  # they use what the client's trainings made
        added=_TRAIN_AGAIN,
        ignored=("inputs", "without_option"),
    ),
    Trained("tutorials/15_fsdp2_and_when_ddp_is_not_enough.ipynb", ("model",)),
    Trained("tutorials/A_data_parallel_from_the_inside.ipynb", ("model",)),
    # `init` destroys the process group, and the client rejoins the ranks
    Trained("tutorials/B_write_a_backend.ipynb", ("model",), omitted=("init",), seeded=("train",)),
]


def _assert_equal(one: Trained, folder: Path) -> None:
    cluster, script = exporting.compared(one, folder)
    names = {name.partition(": ")[2].partition("[")[0] for name in script}
    print(f"{one.path}: {len(script)} tensors of {', '.join(sorted(names))}")
    assert set(one.models) <= names
    assert exporting.differing(cluster, script, one.ignored) == []


@pytest.mark.soak
@pytest.mark.parametrize("one", TRAINED, ids=lambda one: Path(one.path).stem)
def test_notebooks_that_train_are_equal_bit_for_bit(one: Trained, tmp_path: Path) -> None:
    """All tensors of both ranks are equal at the end of a notebook, on a cluster and in its script."""
    _assert_equal(one, tmp_path)


def test_the_script_needs_no_torchrun_command(tmp_path: Path) -> None:
    """`python train.py -n 2` starts the ranks itself; options set backend, threads and environment variables."""
    # Each line is written in one piece: the ranks write to one pipe.
    source = "%%distributed\nfacts = [rank, world_size, dist.get_backend(), torch.get_num_threads(), os.environ['A']]"
    source += "\nprint(f'{facts}\\n', end='')\nprint(f'drawn {torch.rand(1).item()}\\n', end='')"
    cells = ["%cluster start -n 1 --backend gloo --env A=1", "# export\nimport os", source]
    script = tmp_path / "train.py"
    exporting.write(cells, tmp_path / "train.ipynb")
    export_notebook(tmp_path / "train.ipynb", script)
    printed = exporting.run([sys.executable, str(script), "-n", "2", "--threads", "1", "--A", "b c"], tmp_path)
    assert sorted(line for line in printed.splitlines() if "gloo" in line) == [
        f"[{rank}, 2, 'gloo', 1, 'b c']" for rank in range(2)
    ]
    drawn = [line for line in printed.splitlines() if "drawn" in line]
    assert len(drawn) == 2
    assert len(set(drawn)) == 1, "as on a cluster, all ranks begin with one seed"


def test_values_of_the_notebook_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """A marked plain cell pushes the values of rank 0; `--ranks` and `await` do what they do in a notebook."""
    cells = [
        "%cluster start -n 2 --backend gloo",
        "# export\nimport os\npid = os.getpid()\nlab.push({'first': pid})",
        "%%distributed\nimport asyncio\nasync def later(x):\n    await asyncio.sleep(0)\n    return x",
        "%%distributed --ranks 1\nmine = await later(f'''a\n  b{rank}''')\nprint(f'{[mine]}\\n', end='')",
        "%%distributed\nprint('same\\n' if (first == pid) == (rank == 0) else 'not the same\\n', end='')",
    ]
    exporting.write(cells, tmp_path / "train.ipynb")
    export_notebook(tmp_path / "train.ipynb", tmp_path / "train.py")
    printed = exporting.run_script(tmp_path / "train.py", tmp_path, {})
    lines = printed.splitlines()
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
