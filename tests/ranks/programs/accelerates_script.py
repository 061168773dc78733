"""Runs a script of accelerate's wheel as it is, and saves what the models that it prepared have become.

The scripts draw their data from generators without a seed; here each rank has one of its own, the same in every run.

Arguments: name of the script, path to save.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import numpy
import torch


def main(name: str, path: str) -> None:
    from accelerate import Accelerator

    draw, rank = numpy.random.default_rng, int(os.environ["RANK"])
    numpy.random.default_rng = lambda seed=None: draw(rank if seed is None else seed)
    models: list[Any] = []
    prepare = Accelerator.prepare_model

    def kept(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        models.append(prepare(self, *args, **kwargs))
        return models[-1]

    Accelerator.prepare_model = kept
    sys.argv = [name]
    runpy.run_module(f"accelerate.test_utils.scripts.{name}", run_name="__main__")
    states = [{key: value.clone() for key, value in model.state_dict().items()} for model in models]
    torch.save(states, f"{path}.{rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
