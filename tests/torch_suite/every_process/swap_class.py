"""Makes torch's tests see another DistributedDataParallel, on a machine without GPUs.

Read from the environment:
    DDP_LAB_SUITE_CLASS: ``module:Class``, or ``stock`` for torch's own class, as a control.
    DDP_LAB_SUITE_MODE: ``plain``; ``cpuify``: GPUs are pretended (`pretended_gpus.py`); ``revived``: the same, and
        tests run that torch has switched off.
    DDP_LAB_SUITE_MARKS: a file to which each process appends a line for each constructor of a DistributedDataParallel
        that runs: ``PID CLASS BY``, the module of the object's class and that of the constructor's.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any


def main() -> None:
    """Swaps the class, then prepares what the mode asks for."""
    import torch.nn.parallel.distributed as home

    chosen = os.environ["DDP_LAB_SUITE_CLASS"]
    torchs = home.DistributedDataParallel
    if chosen != "stock":
        module, _, name = chosen.partition(":")
        ours = getattr(importlib.import_module(module), name)
        _rebind(torchs, ours)
        _note_constructions(ours)
    _note_constructions(torchs)
    mode = os.environ["DDP_LAB_SUITE_MODE"]
    if mode != "plain":
        import pretended_gpus

        pretended_gpus.install()
    if mode == "revived":
        _run_what_torch_switched_off()


def _rebind(old: type, new: type) -> None:
    """Every name of a loaded module that means the old class means the new one, but where the new one subclasses it."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or names.get("__name__", "").split(".")[0] == new.__module__.split(".")[0]:
            continue
        for name in [name for name, value in names.items() if value is old]:
            names[name] = new


def _note_constructions(cls: type[Any]) -> None:
    construct = cls.__init__

    @functools.wraps(construct)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        _mark(type(self).__module__, cls.__module__)
        construct(self, *args, **kwargs)

    cls.__init__ = noted


def _mark(*words: str) -> None:
    with open(os.environ["DDP_LAB_SUITE_MARKS"], "a") as file:
        file.write(" ".join([str(os.getpid()), *words]) + "\n")


def _run_what_torch_switched_off() -> None:
    """A test that torch skips because of an issue of its own, or as flaky on its machines, is run."""
    import unittest

    from torch.testing._internal import common_utils

    def without_issues(skip_if: Any) -> Any:
        def decorator(condition: Any, reason: str) -> Any:
            issue = any(words in reason for words in ("github.com/pytorch", "flakiness", "Currently failing"))
            return _unchanged if issue else skip_if(condition, reason)

        return decorator

    unittest.skipIf = without_issues(unittest.skipIf)  # type: ignore[assignment]
    common_utils.skip_but_pass_in_sandcastle_if = without_issues(common_utils.skip_but_pass_in_sandcastle_if)
    unittest.skip = common_utils.skip_but_pass_in_sandcastle = lambda reason: unittest.skipIf(True, reason)


def _unchanged(test: Any) -> Any:
    @functools.wraps(test)  # torch's tests look for what they wrap
    def run(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    return run
