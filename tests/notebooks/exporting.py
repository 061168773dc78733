"""Runs a notebook's cells on a cluster and its exported script under torchrun; collects the tensors of both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import nbformat
import torch

from ddp_lab.notebook.scripts import export_notebook

from . import running

KEEP = '''%%distributed
import os


def tensors_of(value, name, depth=0):
    """The tensors in a value, with names: of models, optimizers, lists and dicts."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    elif isinstance(value, torch.optim.Optimizer):
        value = value.state_dict()["state"]
    if isinstance(value, torch.Tensor):
        value = getattr(value, "_local_tensor", value)  # of a sharded one this rank's part
        yield name, value.detach().cpu().clone()
    elif isinstance(value, (list, tuple)) and depth < 4:
        for number, one in enumerate(value):
            yield from tensors_of(one, f"{name}[{number}]", depth + 1)
    elif isinstance(value, dict) and depth < 4:
        for key, one in value.items():
            yield from tensors_of(one, f"{name}[{key!r}]", depth + 1)


kept = dict(pair for name, value in list(globals().items()) if name[0] != "_" for pair in tensors_of(value, name))
torch.save(kept, f"{os.environ['KEPT']}/{rank}.pt")
'''
"""A cell that saves every tensor of a rank's namespace."""
SCRIPT = '''"""Trains a small model."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.randn(32, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{os.environ['KEPT']}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
"""A script for torchrun, of the usual form."""


class _Trained(Protocol):
    """See `test_exported_scripts.Trained`."""

    @property
    def path(self) -> str: ...
    @property
    def marked(self) -> Sequence[str]: ...
    @property
    def omitted(self) -> Sequence[str]: ...
    @property
    def added(self) -> str: ...
    @property
    def seeded(self) -> Sequence[str]: ...
    @property
    def sources(self) -> Mapping[str, str]: ...


def compared(one: _Trained, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of both ranks at the end of a notebook: those on its cluster, and those of its script.

    Args:
        one: the notebook, and how the copy that is run differs from it.
        folder: an empty one, for what is written.
    """
    path = running.PROJECT / one.path
    notebook = _prepared(path, one)
    kept = kept_folders(folder)
    executed = running.execute(notebook, path.parent, running.KERNEL_ENVIRONMENT | {"KEPT": str(kept["cluster"])})
    stored, script = folder / path.name, folder / f"{path.stem}.py"
    nbformat.write(executed, stored)
    print("\n".join(export_notebook(stored, script)))
    run_script(script, path.parent, {"KEPT": str(kept["script"]), "PYTHONPATH": f"{running.PROJECT}:{path.parent}"})
    return loaded(kept["cluster"]), loaded(kept["script"])


def _prepared(path: Path, one: _Trained) -> running.Notebook:
    notebook = running.read(path)
    if "exercise-4" in [cell.id for cell in notebook.cells] and "04_" in path.name:
        _solve(notebook)
    for name, source in one.sources.items():
        running.cell(notebook, name).source = source
    for name in one.marked:
        found = running.cell(notebook, name)
        found.source = f"# export\n{found.source}"
    for name in one.seeded:
        found = running.cell(notebook, name)
        found.source = found.source.replace("\n", "\ntorch.manual_seed(0)\n", 1)
    for name in one.omitted:
        found = running.cell(notebook, name)
        found.source = found.source.replace("\n", "\n# no export\n", 1)
    last = max(number for number, cell in enumerate(notebook.cells) if "%cluster stop" in cell.source)
    added = [text for text in (one.added, KEEP) if text]
    notebook.cells[last:last] = [nbformat.v4.new_code_cell(text) for text in added]
    return notebook


def _solve(notebook: running.Notebook) -> None:
    """Lesson 4: the exercise whose cell fails on purpose gets the functions of its solution."""
    exercise, solution = running.tagged(notebook, "exercise-4"), running.tagged(notebook, "solution-4")
    functions = solution.source.partition("\nsave(f")[0]
    exercise.source = functions + "\n" + exercise.source[exercise.source.index("model = ") :]


def write(cells: Sequence[str], path: Path) -> None:
    """Writes a notebook of code cells."""
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells]), path)


def kept_folders(folder: Path) -> dict[str, Path]:
    """New folders for what the cluster and the script save."""
    kept = {where: folder / f"kept-{where}" for where in ("cluster", "script")}
    for one in kept.values():
        one.mkdir()
    return kept


def run_script(script: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Runs a script on two ranks under torchrun, on the CPU; returns its output."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*torchrun, str(script)], folder, environment)


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command that must succeed; returns its output."""
    given = {**os.environ, **running.KERNEL_ENVIRONMENT, **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def loaded(folder: Path) -> dict[str, Any]:
    """The tensors that two ranks have saved."""
    return {
        f"rank {rank}: {name}": value
        for rank in range(2)
        for name, value in torch.load(folder / f"{rank}.pt", weights_only=True).items()
    }


def differing(one: dict[str, Any], other: dict[str, Any], ignored: Sequence[str] = ()) -> list[str]:
    """The names of tensors that are not equal bit for bit, or that are on one side only.

    Args:
        one: tensors by name.
        other: the same of another run.
        ignored: global names that do not count.
    """
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name.partition(": ")[2].partition("[")[0] not in ignored
        and (name not in one or name not in other or not _equal(one[name], other[name]))
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether shapes, types and bits are equal; so is NaN with itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return bool(one.is_floating_point() and torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)))
