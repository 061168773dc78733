"""`check_hook` on torch's hooks, and on hooks that are broken in one way each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import ddp_lab
from ddp_lab import recording
from ddp_lab.parallel.hook_check.cases import Case
from tests.ranks.compare import everywhere
from tests.ranks.harness import on_ranks

Future = torch.futures.Future


def _averaged(group: dist.ProcessGroup | None, buffer: torch.Tensor) -> Any:
    size = dist.get_world_size(group)
    return dist.all_reduce(buffer.div_(size), group=group, async_op=True).get_future()


def _wrong_size(group: Any, bucket: Any) -> Any:
    return _averaged(group, bucket.buffer()).then(lambda f: torch.cat([f.value()[0], f.value()[0]]))


def _not_divided(group: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda f: f.value()[0])


def _divided_twice(group: Any, bucket: Any) -> Any:
    return _averaged(group, bucket.buffer()).then(lambda f: f.value()[0] / dist.get_world_size(group))


def _differs_by_rank(group: Any, bucket: Any) -> Any:
    return _averaged(group, bucket.buffer()).then(lambda f: f.value()[0] * (1 + 1e-6 * dist.get_rank(group)))


def _never(group: Any, bucket: Any) -> Any:
    return Future()


def _fails_later(group: Any, bucket: Any) -> Any:
    def decode(future: Any) -> torch.Tensor:
        raise ValueError("no such codebook")

    return _averaged(group, bucket.buffer()).then(decode)


def _raises(group: Any, bucket: Any) -> Any:
    raise ValueError("no such state")


def _no_future(group: Any, bucket: Any) -> Any:
    return bucket.buffer()


def _no_tensor(group: Any, bucket: Any) -> Any:
    return _averaged(group, bucket.buffer()).then(lambda f: {"gradients": f.value()[0]})


def _converted(group: Any, bucket: Any) -> Any:
    return _averaged(group, bucket.buffer()).then(lambda f: f.value()[0].half())


def _hides_nan(group: Any, bucket: Any) -> Any:
    return _averaged(group, bucket.buffer().nan_to_num_(0, 1, -1)).then(lambda f: f.value()[0])


def _normalised(group: Any, bucket: Any) -> Any:
    norm = bucket.buffer().norm()
    buffer = bucket.buffer()
    total = torch.stack([norm])
    dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    return _averaged(group, buffer / total).then(lambda f: f.value()[0] * total)


def _two_arguments_too_few() -> Any:
    return None


BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "wrong size": (_wrong_size, "elements"),
    "not divided": (_not_divided, "2 times the mean"),
    "divided twice": (_divided_twice, "0.5 times the mean"),
    "ranks differ": (_differs_by_rank, "rank 0 and rank 1"),
    "never completes": (_never, "within 1 s"),
    "fails later": (_fails_later, "no such codebook"),
    "raises": (_raises, "no such state"),
    "no future": (_no_future, "torch.Tensor"),
    "no tensor": (_no_tensor, "dict"),
    "zeros broken": (_normalised, "nan"),
    "not averaged": (noop_hook, "own gradient"),
    "refused": (_two_arguments_too_few, "TypeError|can't be called"),
}
MILD: dict[str, Callable[..., Any]] = {"converted": _converted, "hides non-finite": _hides_nan}


def _report(hook: Any, state: Any = None, **options: Any) -> Any:
    """The report, after a look at whether all ranks have the same (but for notes and times)."""
    report = ddp_lab.check_hook(hook, STATES[state]() if isinstance(state, str) else state, **options)
    assert len(set(everywhere((str(report.problems), report.ok, report.verdict)))) == 1
    return report


class _Counting:
    __slots__ = ("calls", "group", "memory")

    def __init__(self) -> None:
        self.calls, self.group, self.memory = 0, dist.group.WORLD, {}


def _counted(state: Any, bucket: Any) -> Any:
    state.calls += 1
    state.memory[bucket.index()] = bucket.buffer()
    return _averaged(state.group, bucket.buffer()).then(lambda f: f.value()[0])


@on_ranks(2)
def test_the_users_state_and_random_numbers_stay(rank: int, size: int) -> None:
    """Every trial has a state of its own, with the user's group in it; the user's is untouched, and so is the RNG. The
    check's own steps are not recorded, those after it are. (Before hooks that never end, whose threads go on.)"""
    state = _Counting()
    before, recorded = torch.get_rng_state(), recording.statistics().recorded
    assert recording.enabled()
    report = ddp_lab.check_hook(_counted, state, steps=2)
    assert torch.equal(before, torch.get_rng_state())
    events, _, _ = recording.drain(recorded)
    let_through = events[["kind", "reducer", "bucket", "step"]].tolist()
    assert (let_through, recording.enabled()) == ([], True)
    assert (report.ok, state.calls, len(state.memory)) == (True, 0, 0)


@pytest.mark.parametrize("kind", BROKEN)
@on_ranks(2)
def test_a_broken_hook_is_named_with_a_remedy(rank: int, size: int, kind: str) -> None:
    """Each mistake is an error of its own kind, with evidence and a remedy, the same on all ranks, and none hangs."""
    hook, evidence = BROKEN[kind]
    report = _report(hook, timeout=1.0 if kind == "never completes" else 30.0, steps=2)
    assert not report.ok
    found = {problem.kind: problem for problem in report.problems if problem.severity == "error"}
    assert kind in found, str(report)
    assert any(part in found[kind].what for part in evidence.split("|")), found[kind].what
    assert found[kind].remedy
    assert kind in str(report)
    assert kind in report._repr_html_()


@pytest.mark.parametrize("kind", MILD)
@on_ranks(2)
def test_what_may_be_meant_is_a_warning(rank: int, size: int, kind: str) -> None:
    """A result of another dtype, and NaN that vanishes, are warnings: the report is ok."""
    report = _report(MILD[kind], steps=3, timeout=30.0)
    assert report.ok
    assert [problem.kind for problem in report.problems if problem.severity == "warning"] == [kind], str(report)


def _power(**options: Any) -> Any:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5, **options)


STATES: dict[str, Callable[[], Any]] = {
    "power": lambda: _power(matrix_approximation_rank=2),
    "cold": lambda: _power(use_error_feedback=False, warm_start=False),
    "local": lambda: post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 1000),
}
ONE = {"in_flight": 1}  # with several buckets their callbacks wait for Gloo's threads forever
GOOD: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, None, {"tolerance": 1e-6, "dtypes": [torch.float32]}),
    "fp16": (default_hooks.fp16_compress_hook, None, {"tolerance": 1e-2, "dtypes": [torch.float32]}),
    "fp16 wrapper": (functools.partial(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)), None, {}),
    "powersgd": (powerSGD_hook.powerSGD_hook, "power", ONE),
    "powersgd cold": (powerSGD_hook.powerSGD_hook, "cold", ONE),
    "post_localSGD": (post_localSGD_hook.post_localSGD_hook, "local", {}),
    "builtin allreduce": (dist.BuiltinCommHookType.ALLREDUCE, None, {}),
    "builtin fp16": (dist.BuiltinCommHookType.FP16_COMPRESS, None, {}),
}


@pytest.mark.parametrize("kind", GOOD)
@on_ranks(2)
def test_torchs_hooks_pass(rank: int, size: int, kind: str) -> None:
    """No error is found in a hook of torch's; the user's state is left as it was."""
    hook, state, options = GOOD[kind]
    report = _report(hook, state, steps=10, timeout=30.0, **options)
    assert report.ok, str(report)
    assert report.training is not None
    assert report.training.equal


@on_ranks(2)
def test_bytes_are_what_collectives_were_given(rank: int, size: int) -> None:
    """The plain hook hands over a bucket's bytes in one all-reduce, fp16 half of them; so in training."""
    for kind, share in (("allreduce", 1.0), ("fp16", 0.5)):
        report = _report(GOOD[kind][0], steps=5, dtypes=[torch.float32], in_flight=2)
        for bucket in report.buckets:
            assert bucket.payload_bytes == share * bucket.buffer_bytes
            assert bucket.wire_bytes == bucket.payload_bytes  # 2 (n - 1) / n with two ranks
            assert bucket.collectives == {"allreduce": 1.0}
        assert report.training.payload_bytes == share * report.training.plain_payload_bytes


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_errors_are_relative_to_the_exact_mean(rank: int, size: int) -> None:
    """A hook that sums has a relative error of n - 1, in one round and accumulated; inputs differ between ranks."""
    case = Case(torch.float32, ((7,), (3, 5)))
    report = _report(_not_divided, steps=0, dtypes=[torch.float32], in_flight=1)
    gradients = [case.gradients(other, 0, torch.device("cpu")) for other in range(size)]
    assert not torch.equal(gradients[0][0], gradients[1][0])
    (found,) = (bucket for bucket in report.buckets if bucket.numel == 22 and bucket.error > 0)
    assert found.error == pytest.approx(size - 1, abs=1e-5)
    assert found.accumulated_error == pytest.approx(size - 1, abs=1e-5)


@on_ranks(2)
def test_the_rank_that_fails_is_told_from_those_that_wait(rank: int, size: int) -> None:
    """If one rank raises and the other waits for it, the report names the former, and nothing more is tried."""
    group = dist.new_group([0, 1])

    def hook(state: Any, bucket: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("only here")
        return _averaged(group, bucket.buffer()).then(lambda f: f.value()[0])

    report = _report(hook, timeout=2.0)
    (problem,) = report.problems
    assert problem.kind == "raises"
    assert "rank 1" in problem.what
    assert "only here" in problem.what
    assert "Rank 0 waited" in problem.what
    assert report.training is None


@on_ranks(2)
def test_a_hook_that_blocks_is_found_where_it_waits(rank: int, size: int) -> None:
    """A call that does not return ends the check in time, with the line where it waits."""
    group, waiting = dist.new_group([0, 1]), dist.new_group([0, 1])

    def hook(state: Any, bucket: Any) -> Any:
        if dist.get_rank() == 0:
            dist.barrier(waiting)
        return _averaged(group, bucket.buffer()).then(lambda f: f.value()[0])

    report = ddp_lab.check_hook(hook, timeout=2.0)
    if rank == 1:
        dist.barrier(waiting)  # lets the other rank's hook end
    assert not report.ok
    assert report.problems[0].kind == "never ends"
    assert "barrier" in report.problems[0].what


def _by_index(state: Any, bucket: Any) -> Any:
    memory = state.memory.setdefault(bucket.index(), torch.zeros_like(bucket.buffer()))
    return _averaged(state.group, bucket.buffer() + 0 * memory).then(lambda f: f.value()[0])


@on_ranks(2)
def test_memory_by_bucket_index_fails_in_training(rank: int, size: int) -> None:
    """Buckets are rebuilt after the first backward: a hook that trusts their index is caught, and told so."""
    report = _report(_by_index, _Counting(), steps=3, timeout=30.0)
    (found,) = report.problems
    assert found.kind == "fails in training"
    assert "step 1" in found.what
    assert "Buckets are rebuilt" in found.remedy


@on_ranks(2)
def test_training_with_a_model_of_the_users(rank: int, size: int) -> None:
    """With the plain hook losses are the plain average's; the model's dtype comes first, and it is unchanged. A model
    without a loss is refused."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(wrapped: Any, step: int) -> torch.Tensor:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        return (wrapped(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    report = _report(default_hooks.allreduce_hook, model=model, loss=loss, steps=12)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert report.ok, str(report)
    assert report.training.losses == pytest.approx(report.training.plain_losses)
    assert report.training.losses[-1] < report.training.losses[0]
    assert report.buckets[0].dtype == "float64"
    with pytest.raises(ValueError, match=r"model and loss.*together"):
        _report(noop_hook, model=nn.Linear(1, 1))
