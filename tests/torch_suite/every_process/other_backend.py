"""Lets torch's tests of Gloo run with another backend of the same abilities.

[Note: tests of one backend with another]
torch's tests read the backend's name from the environment when they are imported, and decide then which of them run:
"only Gloo supports timeouts". So they are imported as tests of Gloo, and their backend gets its other name afterwards:
what they ask while they run (`init_process_group`, lists of backends whose events a profile shows) finds the new one.
Groups that a test makes of Gloo by name are made of the new backend too, and those of NCCL where GPUs are pretended.
One helper of the tests knows no names but those of torch's own backends: for it alone, every group is of Gloo.

torch runs some tests, those of all-to-all on CPUs, with MPI alone: in the mode ``mpi`` they are imported as its tests.

Read from the environment:
    DDP_LAB_SUITE_BACKEND: the backend's name.
    DDP_LAB_SUITE_MARKS: a file to which each process appends a line for each backend that a group is made of: ``PID
        backend NAME``, as the backend itself calls it.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

GLOO = "gloo"
_REPLACED = (GLOO, "mpi", "nccl")


def chosen() -> str:
    """The backend that takes Gloo's place, or Gloo itself."""
    return os.environ["DDP_LAB_SUITE_BACKEND"]


def rename() -> None:
    """After torch's tests have been imported, in every process."""
    _note_groups()
    if chosen() == os.environ["BACKEND"]:
        return
    from torch.testing._internal.distributed import distributed_test

    import ddp_lab.comm

    tests: Any = distributed_test
    ddp_lab.comm.register()
    tests.BACKEND = os.environ["BACKEND"] = chosen()
    for name in (
        "PROFILING_SUPPORTED_BACKENDS",
        "CUDA_PROFILING_SUPPORTED_BACKENDS",
        "SEND_RECV_PROFILING_SUPPORTED_BACKENDS",
    ):
        getattr(tests, name).append(chosen())
    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"):
        _everywhere(name, _of_the_chosen)
    base = tests.DistributedTest._DistTestBase
    base._test_accumulate_gradients_no_sync = _with_names(base._test_accumulate_gradients_no_sync, BACKEND=GLOO)


def _everywhere(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """In both modules under which torch publishes its collectives."""
    c10d: Any = dist.distributed_c10d
    wrapped = wrap(getattr(c10d, name))
    setattr(c10d, name, wrapped)
    setattr(dist, name, wrapped)


def _of_the_chosen(make_group: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_group)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") in _REPLACED:
            kwargs["backend"] = chosen()
        return make_group(*(chosen() if isinstance(one, str) and one in _REPLACED else one for one in args), **kwargs)

    return made


def _with_names(function: Any, **names: Any) -> Any:
    """The function, for which these globals mean something else."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    known = {**function.__globals__, **names}
    return types.FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)


def _note_groups() -> None:
    c10d: Any = dist.distributed_c10d
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def noted(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if type(made[0]) is dist.ProcessGroup:  # one that is written in Python has no backend
            name = made[0]._get_backend(torch.device("cpu")).name()
            with open(os.environ["DDP_LAB_SUITE_MARKS"], "a") as file:
                file.write(f"{os.getpid()} backend {name}\n")
        return made

    c10d._new_process_group_helper = noted
