"""Runs a notebook's cells on a cluster and its exported script under torchrun; collects the tensors of both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def compared(path: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of both ranks at the end of a notebook: those on its cluster, and those of its script.

    Args:
        path: of the notebook.
        folder: an empty one, for what is written.
    """
    notebook, kept = running.read(path), kept_folders(folder)
    last = max(number for number, cell in enumerate(notebook.cells) if "%cluster stop" in cell.source)
    notebook.cells.insert(last, nbformat.v4.new_code_cell(KEEP))
    executed = running.execute(notebook, path.parent, running.KERNEL_ENVIRONMENT | {"KEPT": str(kept["cluster"])})
    stored, script = folder / path.name, folder / f"{path.stem}.py"
    nbformat.write(executed, stored)
    print("\n".join(export_notebook(stored, script)))
    run_script(script, path.parent, {"KEPT": str(kept["script"]), "PYTHONPATH": f"{running.PROJECT}:{path.parent}"})
    return loaded(kept["cluster"]), loaded(kept["script"])


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


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of tensors that are not equal bit for bit, or that are on one side only."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not _equal(one[name], other[name])
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether shapes, types and bits are equal; so is NaN with itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return bool(one.is_floating_point() and torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)))
