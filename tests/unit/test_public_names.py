"""What users may import, and what importing it must not load."""

from __future__ import annotations

import subprocess
import sys

import ddp_lab


def run(code: str) -> str:
    """Runs `code` in a fresh interpreter and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_frozen() -> None:
    """`ddp_lab.__all__` is exactly the documented list."""
    assert ddp_lab.__all__ == [
        "BucketStateError",
        "CellError",
        "CellResult",
        "Cluster",
        "ClusterError",
        "CommModel",
        "DataParallel",
        "DdpLabError",
        "DistributedDataParallel",
        "ExtensionError",
        "RankFailure",
        "Timeline",
        "check_drift",
        "check_hook",
        "compare",
        "copy_state_from",
        "current_cluster",
        "data_parallel",
        "follow",
        "measure_memory",
        "observe",
        "replace_torch_ddp",
        "serve_doctor",
        "serve_mcp",
        "fault_injection",
        "faults",
        "recording",
        "__version__",
        "load_ipython_extension",
        "unload_ipython_extension",
    ]


def test_public_names_of_comm_are_frozen() -> None:
    """`ddp_lab.comm` has its documented names and two modules, and importing it makes the backends known."""
    code = (
        "import ddp_lab.comm as c, torch.distributed as d;"
        "print(*c.__all__, d.Backend.SHM, d.Backend.ROUND_ROBIN, all(hasattr(c, name) for name in c.__all__))"
    )
    assert run(code).split() == [
        "Capabilities",
        "all_gather_multigpu",
        "all_reduce_multigpu",
        "broadcast_multigpu",
        "capabilities",
        "reduce_multigpu",
        "reduce_scatter_multigpu",
        "register",
        "round_robin",
        "round_robin_process_group",
        "shared_memory",
        "shm",
        "round_robin",
        "True",
    ]


def test_every_public_name_resolves() -> None:
    """Each name of `__all__` can be imported."""
    for name in ddp_lab.__all__:
        assert getattr(ddp_lab, name) is not None


def test_client_side_loads_no_torch() -> None:
    """Importing the package, the cluster, the magics and the widgets leaves torch out."""
    modules = "ddp_lab, ddp_lab.cluster.cluster, ddp_lab.notebook.magics, ddp_lab.widgets.dashboard, ddp_lab.cli.main"
    assert run(f"import sys, {modules}; print('torch' in sys.modules)") == "False"


def test_rank_side_loads_no_widgets() -> None:
    """Importing the DDP class and the rank's bootstrap leaves ipywidgets, anywidget and plotly out."""
    code = (
        "import sys, ddp_lab.parallel.distributed, ddp_lab.engine.rank;"
        "print({'ipywidgets', 'anywidget', 'plotly'} & set(sys.modules))"
    )
    assert run(code) == "set()"


def test_core_knows_no_notebook() -> None:
    """The DDP class alone loads neither ipyparallel nor IPython nor zmq."""
    code = (
        "import sys, ddp_lab; ddp_lab.DistributedDataParallel;"
        "print({'ipyparallel', 'IPython', 'zmq'} & set(sys.modules))"
    )
    assert run(code) == "set()"


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
