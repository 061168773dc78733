"""What users may import, and what importing it must not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ddp_lab
from ddp_lab.notebook.options import Parser, add_start_options, distributed_parser

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    """Runs `code` in a fresh interpreter and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PUBLIC = """
    BucketStateError CellError CellResult Cluster ClusterError CommModel DataParallel DdpLabError
    DistributedDataParallel ExtensionError RankFailure Timeline check_drift check_hook compare copy_state_from
    current_cluster data_parallel follow measure_memory observe replace_torch_ddp serve_doctor serve_mcp
    fault_injection faults recording __version__ load_ipython_extension unload_ipython_extension
"""


def test_public_names_are_frozen() -> None:
    """`ddp_lab.__all__` is exactly the documented list, and each name can be imported."""
    assert ddp_lab.__all__ == PUBLIC.split()
    assert all(getattr(ddp_lab, name) is not None for name in ddp_lab.__all__)


def test_some_names_have_a_second_spelling() -> None:
    """What the magics and scripts of earlier documents say is the same object or option."""
    assert ddp_lab.attach is ddp_lab.follow
    assert ddp_lab.install is ddp_lab.replace_torch_ddp
    assert ddp_lab.restore_from is ddp_lab.copy_state_from
    assert ddp_lab.Cluster.find == ddp_lab.Cluster.attach
    start, parse = Parser("%cluster start", ""), distributed_parser().parse_args
    add_start_options(start)
    second = "--engines slurm --address 10.0.0.1 --lease 5"
    first = "--launcher slurm --client-address 10.0.0.1 --idle-timeout 5"
    assert start.parse_args(second.split()) == start.parse_args(first.split()) != start.parse_args([])
    assert parse(["--watch"]) == parse(["--dashboard"]) != parse([])


COMM = """
    Capabilities all_gather_multigpu all_reduce_multigpu broadcast_multigpu capabilities reduce_multigpu
    reduce_scatter_multigpu register round_robin round_robin_process_group shared_memory shm round_robin True
"""


def test_public_names_of_comm_are_frozen() -> None:
    """`ddp_lab.comm` has its documented names and two modules, and importing it makes the backends known."""
    code = (
        "import ddp_lab.comm as c, torch.distributed as d;"
        "print(*c.__all__, d.Backend.SHM, d.Backend.ROUND_ROBIN, all(hasattr(c, name) for name in c.__all__))"
    )
    assert run(code).split() == COMM.split()


REPORT = "import ddp_lab; ddp_lab.Timeline.load('tutorials/recordings/run-1.npz').report('/dev/null')"
PAPER = """import sys; sys.path.append("notebooks")
import paper
about = {'data': 'digits', 'batch': 8, 'lr': 0.02, 'held_out': 1, 'accuracy': 1}
found = paper.result(11, [[about | {'every': 1, 'losses': [1.0] * 20}]])
paper.picture(found), paper.table(found)"""
CLIENT = "ddp_lab, ddp_lab.cluster.cluster, ddp_lab.notebook.magics, ddp_lab.dashboard.dashboard, ddp_lab.cli.main"


@pytest.mark.parametrize(
    ("loaded", "libraries"),
    [
        (f"import {CLIENT}", {"torch"}),  # the client side
        ("import ddp_lab.parallel.distributed, ddp_lab.engine.rank", {"ipywidgets", "anywidget", "plotly"}),  # a rank
        ("import ddp_lab; ddp_lab.DistributedDataParallel", {"ipyparallel", "IPython", "zmq"}),  # the class alone
        (REPORT, {"pandas", "plotly", "torch"}),
        (PAPER, {"torch"}),
    ],
    ids=["client", "rank", "class", "report", "paper"],
)
def test_each_side_loads_only_what_it_needs(loaded: str, libraries: set[str]) -> None:
    """The client leaves torch out, a rank widgets and plots, and the DDP class alone all that a notebook needs. A
    report of a recording is written without torch and plots, and the paper's figures are made without torch."""
    assert run(f"{loaded}\nimport sys; print({libraries} & set(sys.modules))") == "set()"


def test_an_extension_for_another_torch_is_refused_with_the_remedy() -> None:
    """A torch that was not built for raises an error that names it, one that would do, and how to rebuild."""
    code = (
        "import torch; torch.__version__ = '2.0.0+other'\n"
        "from ddp_lab import native, ExtensionError\n"
        "try: native.load()\n"
        "except ExtensionError as e: print(e)"
    )
    message = run(code)
    assert "2.0.0+other" in message
    assert "rebuild" in message
    assert "install torch==" in message
