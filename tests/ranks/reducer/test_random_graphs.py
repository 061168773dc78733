"""Property: whatever the graph and the options, gradients are torch's DDP's, and those of one process on all samples.

Where torch's are wrong (a second backward, a static graph after no_sync) only one process is compared with.

Cases are drawn from seeds (graph_cases.py). A failing one is made smaller, and the failure ends with the command that
runs it alone, with ``DDP_LAB_CASE``. ``DDP_LAB_SEED=n`` starts at another seed.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_lab import DistributedDataParallel
from ddp_lab.comm.shared_memory import gloo_of_one_thread
from tests.ranks.conftest import Ranks
from tests.ranks.graph_cases import Case, RandomGraph, draw, inputs_of, loss_of, smallest, torch_can
from tests.ranks.harness import RankError
from tests.waiting import DEADLINE_S

PROCESSES = 4
BLOCK = 25  # cases that the ranks run in one go
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.soak) for block in range(1, 12))]
GIVEN = os.environ.get("DDP_LAB_CASE")
SEED = int(os.environ.get("DDP_LAB_SEED", "0"))

_groups: dict[tuple[int, bool], Any] = {}


# -- on a rank


def _group(case: Case) -> Any:
    """The group of the first `case["world"]` ranks; None, the default group, if these are all.

    Sparse gradients need another one: see [Note: threads of Gloo] in ddp_lab/comm/shared_memory.py.
    """
    return _groups[case["world"], any(node["kind"] == "embedding" for node in case["nodes"])]


def _make_groups(size: int) -> None:
    if _groups:
        return
    dist.Backend.register_backend("gloo_of_one_thread", gloo_of_one_thread, devices=["cpu"])
    for world in range(1, size + 1):
        ranks = list(range(world))
        _groups[world, False] = dist.new_group(ranks) if world < size else None
        _groups[world, True] = dist.new_group(ranks, backend="gloo_of_one_thread")


def _wrapped(case: Case, module: nn.Module, theirs: bool, size: int) -> Any:
    group = _group(case)
    arguments = {
        **case["arguments"],
        "process_group": group,
        "find_unused_parameters": case["mode"] == "find_unused",
        "static_graph": case["mode"] == "static",
    }
    cls = nn.parallel.DistributedDataParallel if theirs else DistributedDataParallel
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters  # older releases lack some
    model = cls(module, **{name: value for name, value in arguments.items() if name in known})
    if case["hook"] is not None:
        hooks = {"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
        model.register_comm_hook(group or dist.group.WORLD, hooks[case["hook"]])
    return model


def _zero(module: nn.Module, how: str) -> None:
    if how != "keep":
        module.zero_grad(set_to_none=how == "none")


def _train_step(case: Case, model: Any, rank: int, step: int) -> None:
    parts, zero = case["steps"][step]
    _zero(model, zero)
    if case["pattern"] == "turns":
        for part in range(parts):
            with model.no_sync() if part < parts - 1 else contextlib.nullcontext():
                loss_of(model(*inputs_of(case, rank, step, part))).backward()
    elif case["pattern"] == "retained":
        loss = loss_of(model(*inputs_of(case, rank, step, 0)))
        for part in range(parts):
            loss.backward(retain_graph=part < parts - 1)
    else:
        losses = [loss_of(model(*inputs_of(case, rank, step, part))) for part in range(parts)]
        for each in [torch.stack(losses).sum()] if case["pattern"] == "summed" else losses:
            each.backward()


def _whole_step(case: Case, module: nn.Module, step: int) -> None:
    """The same in one process: the mean over the ranks of the loss of all their samples."""
    parts, zero = case["steps"][step]
    _zero(module, zero)
    for rank in range(case["world"]):
        for part in range(parts):
            which = 0 if case["pattern"] == "retained" else part
            (loss_of(module(*inputs_of(case, rank, step, which))) / case["world"]).backward()


def _compare(case: Case, step: int, models: dict[str, nn.Module]) -> None:
    """Raises an AssertionError that names the first gradient that differs.

    From three ranks on the buckets decide in which order Gloo sums. They are torch's, but for a static graph, where
    torch rebuilds them a step later.
    """
    same_buckets = case["mode"] != "static" or case["world"] <= 2
    tolerance = 0.02 if case["hook"] == "fp16" else 2e-5
    named = {who: dict(model.named_parameters()) for who, model in models.items()}
    for name, parameter in named["ours"].items():
        grads = {who: _dense(parameters[name].grad) for who, parameters in named.items()}
        assert len({gradient is None for gradient in grads.values()}) == 1, f"step {step}, {name}: some None, {grads}"
        if parameter.grad is None:
            continue
        if "torch" in named and not parameter.grad.is_sparse:
            assert parameter.grad.stride() == named["torch"][name].grad.stride(), f"step {step}, {name}: strides"
        allowances = {"torch": 0.0 if same_buckets else tolerance, "whole": tolerance}
        for other, allowed in [(other, allowances[other]) for other in named if other != "ours"]:
            torch.testing.assert_close(
                grads["ours"], grads[other], rtol=allowed, atol=allowed, msg=_placed(f"step {step}, {name}, {other}")
            )


def _placed(place: str) -> Callable[[str], str]:
    return lambda message: f"{place}: {message}"


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().to_dense()


def _run_case(case: Case, rank: int, size: int) -> str:
    """What differs, or nothing; raises what training raises."""
    torch.manual_seed(case["seed"])
    module = RandomGraph(case["nodes"], case["output"])
    whole = copy.deepcopy(module)
    ours = _wrapped(case, copy.deepcopy(module), False, size)
    theirs = _wrapped(case, copy.deepcopy(module), True, size) if torch_can(case) else None
    models = {"ours": ours.module, **({"torch": theirs.module} if theirs else {}), "whole": whole}
    for step in range(len(case["steps"])):
        _train_step(case, ours, rank, step)
        if theirs is not None:
            _train_step(case, theirs, rank, step)
        _whole_step(case, whole, step)
        try:
            _compare(case, step, models)
        except AssertionError as difference:
            return f"rank {rank}, {difference}"
    ours._check_reducer_finalized()
    return ""


def _run_on_rank(rank: int, size: int, cases: list[Case], progress: str) -> list[str]:
    """What differs in each case. Other errors end all ranks; then `progress` tells in which case."""
    _make_groups(size)
    differences = []
    for index, case in enumerate(cases):
        Path(f"{progress}/{rank}").write_text(str(index))
        differences.append(_run_case(case, rank, size) if rank < case["world"] else "")
        dist.barrier()  # a failure belongs to the case that every rank is in
    return differences


# -- in the test


def _failure(ranks: Ranks, cases: list[Case], folder: Path) -> tuple[Case, str] | None:
    """The first case that fails and how, or None."""
    try:
        by_rank = ranks(PROCESSES, _run_on_rank, cases, str(folder))
    except RankError as error:
        reached = [int(file.read_text()) for file in folder.iterdir()]
        if not reached:
            raise  # the ranks have not even started
        return cases[min(reached)], str(error)
    for case, texts in zip(cases, zip(*by_rank, strict=True), strict=True):
        if any(texts):
            return case, "\n".join(filter(None, texts))
    return None


def _check(ranks: Ranks, cases: list[Case], folder: Path) -> None:
    failure = _failure(ranks, cases, folder)
    if failure is None:
        return
    case, text = failure
    deadline = time.monotonic() + DEADLINE_S

    def fails(simpler: Case) -> bool:
        return time.monotonic() < deadline and _failure(ranks, [simpler], folder) is not None

    small = smallest(case, fails)
    again = _failure(ranks, [small], folder)
    pytest.fail(
        f"{text}\n\nThe case of seed {case['seed']} fails. Made smaller, it fails with\n\n"
        f"{again[1] if again else '(nothing: it fails sometimes)'}\n\n"
        f"DDP_LAB_CASE='{json.dumps(small)}' make test PYTEST_ARGS=tests/ranks/reducer/test_random_graphs.py"
    )


@pytest.mark.skipif(GIVEN is not None, reason="DDP_LAB_CASE names one case")
@pytest.mark.parametrize("block", BLOCKS)
def test_random_graphs(ranks: Ranks, tmp_path: Path, block: int) -> None:
    """Random graphs, modes, caps, accumulation, hooks, world sizes 1-4: gradients are torch's and one process's."""
    first = SEED + block * BLOCK
    print(f"seeds {first} to {first + BLOCK - 1}")
    _check(ranks, [draw(seed) for seed in range(first, first + BLOCK)], tmp_path)


@pytest.mark.soak
def test_many_random_graphs(ranks: Ranks, tmp_path: Path) -> None:
    """The same for 5000 cases that nobody has seen."""
    first = SEED or 1000 + int(time.time()) % 1_000_000 * 1000
    print(f"seeds {first} to {first + 4999}")
    for start in range(first, first + 5000, 4 * BLOCK):
        _check(ranks, [draw(seed) for seed in range(start, start + 4 * BLOCK)], tmp_path)


if GIVEN is not None:

    def test_the_given_case(ranks: Ranks, tmp_path: Path) -> None:
        """The case in DDP_LAB_CASE, as a failure prints it."""
        failure = _failure(ranks, [json.loads(str(GIVEN))], tmp_path)
        assert failure is None, failure[1]


def test_failing_cases_shrink() -> None:
    """A case is made as small as what makes it fail allows."""

    def fails(case: Case) -> bool:
        return case["world"] >= 2 and any(node["kind"] == "embedding" for node in case["nodes"])

    case = next(case for case in map(draw, range(1000)) if fails(case) and len(case["nodes"]) > 4)
    small = smallest(case, fails)
    assert fails(small)
    assert small["world"] == 2
    assert len(small["nodes"]) == 2
    assert small["steps"] == [[1, "none"]]
    assert (small["mode"], small["hook"], small["output"], small["pattern"]) == ("plain", None, "list", "turns")
    assert sum(node["bias"] or node["dtype"] != "single" for node in small["nodes"]) == 0


def test_the_cases_cover_what_they_are_for() -> None:
    """The seeds of `BLOCKS` hold every mode, hook, world size and kind of node many times."""
    cases = [draw(seed) for seed in range(12 * BLOCK)]
    nodes = [node for case in cases for node in case["nodes"]]
    for mode in ("plain", "find_unused", "static"):
        assert sum(case["mode"] == mode for case in cases) > 50
    for pattern in ("summed", "separate", "retained"):
        assert sum(case["pattern"] == pattern for case in cases) > 10
    for world in (1, 2, 3, 4):
        assert sum(case["world"] == world for case in cases) > 30
    for hook in ("allreduce", "fp16"):
        assert sum(case["hook"] == hook for case in cases) > 20
    for name, value in (("kind", "embedding"), ("frozen", True), ("gated", True), ("dtype", "complex")):
        assert sum(node[name] == value for node in nodes) > 50
    for way in ("reentrant", "non-reentrant"):
        assert sum(node["checkpoint"] == way for node in nodes) > 20
    assert sum(node["again"] is not None for node in nodes) > 100
    assert sum(parts > 1 for case in cases for parts, _ in case["steps"]) > 100
