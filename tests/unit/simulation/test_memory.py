"""Predicted memory, against sums by hand: two layers of 100 and 60 bytes, with Adam's state of twice as much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_lab.simulation.memory import Mark, MemoryPart, ModuleUse, ParameterMemory, RecordedMemory, predict
from ddp_lab.simulation.parameter_groups import ParameterGroup, Sharding, numbered_modules

FIRST, SECOND = (
    ParameterMemory("layers.0.weight", (25,), 100, state=200),
    ParameterMemory("layers.1.weight", (15,), 60, state=120),
)
MODULES = (ModuleUse("", False), ModuleUse("layers.0", False), ModuleUse("layers.1", True))
SHARDED = Sharding((ParameterGroup(("layers.0",), (0,)), ParameterGroup(("layers.1",), (1,))))


def _step(
    activations: int = 0,
    optimizer: int = 0,
    *,
    views: bool = False,
    copies: bool = False,
    unused: tuple[ParameterMemory, ...] = (),
) -> RecordedMemory:
    """A step: both layers' forwards leave `activations`, and both backwards free them again."""
    fixed = 160 + 320 + 160 + sum(one.bytes + one.state for one in unused)  # parameters, state, buckets
    part = MemoryPart
    own = 0 if views else 1
    marks: list[Mark] = []

    def mark(kind: MemoryPart, index: int, rest: int, gradients: int, most: int = 0) -> None:
        held = fixed + rest + own * gradients
        marks.append(Mark(kind, index, held, max(held, most), gradients))

    mark(part.BEGIN, -1, 0, 160)
    mark(part.FORWARD, 0, 0, 0)
    mark(part.FORWARD, 1, 0, 0)
    mark(part.FORWARD_END, 1, activations, 0)
    mark(part.FORWARD, 2, activations, 0)
    mark(part.FORWARD_END, 2, 2 * activations, 0)
    mark(part.FORWARD_END, 0, 2 * activations, 0)
    mark(part.BACKWARD, 0, 2 * activations, 0)
    mark(part.BACKWARD, 2, 2 * activations, 0)
    mark(part.GRADIENT, 1, activations, 60)
    mark(part.BACKWARD, 1, activations, 60)
    mark(part.GRADIENT, 0, 0, 160)
    mark(part.OPTIMIZER, -1, 0, 160)
    mark(part.OPTIMIZER_END, -1, 0, 160, most=fixed + own * 160 + optimizer)
    mark(part.END, -1, 0, 160)
    return RecordedMemory((FIRST, SECOND, *unused), MODULES, 0, 160, views, 2, copies, tuple(marks))


def test_ddp_and_zero_1() -> None:
    """Parameters, gradients and buckets of 160 bytes, state of 320, and what the optimizer needs. The rank with the
    larger layer keeps its state of 200 bytes; of a single rank it keeps all of it. Temporary tensors of five times the
    largest parameter are in proportion to all parameters."""
    found = predict(_step(10, optimizer=30), "ddp")
    assert (found.peak, found.where, found.activations) == (830, "optimizer", 30)
    assert (found.parameters, found.gradients, found.buckets, found.optimizer) == (160, 160, 160, 320)
    assert predict(_step(), "zero-1").optimizer == 200
    assert predict(_step(), "zero-1").peak == 160 * 3 + 200
    assert predict(_step(), "zero-1", ranks=1).peak == 160 * 3 + 320
    assert predict(_step(optimizer=800), "zero-1").activations == 800 * 100 // 160


@pytest.mark.parametrize("views", [False, True])
def test_views_save_the_gradients(views: bool) -> None:
    """From a run with views the peak without them is known, and the other way round."""
    step = _step(10, optimizer=130, views=views)
    assert predict(step, "ddp").peak == 930
    assert predict(step, "ddp, views").peak == 770


def test_an_optimizers_last_tensor_lives_until_the_next() -> None:
    """Two tensors for each parameter, of which one lives on: ZeRO's order has equal parameters in a row."""
    # 100 then 60: 200, then 100 + 120
    step = _step(optimizer=220)
    assert predict(step, "ddp").activations == 220
    third = replace(FIRST, name="layers.1.other")
    # by hand: the factor is min(220 / 100, (220 - 100) / 60, (220 - 60) / 100) = 1.6; sorted: 100, 100, 60
    again = _step(optimizer=220, unused=(third,))
    assert predict(again, "zero-1", ranks=1).activations == 100 + 160


def test_a_step_of_fully_shard() -> None:
    """On 2 ranks shards are padded: 13 of 25 numbers, 8 of 15. The peak is found by hand.

    Padded, the layers have 104 and 64 bytes; their shards 52 and 32; the state of these 104 and 64. The peak comes when
    the first layer's parameters were gathered for its backward: their buffer is still there, the other layer's
    gradients are reduced, and the input of that reduce-scatter is kept.
    """
    found = predict(_step(), "fully_shard", sharding=SHARDED)
    assert found.where == "all-gather, backward of layers.0"
    assert found.parameters == 52 + 32 + 104
    assert found.gradients == 32
    assert found.optimizer == 104 + 64
    assert found.communication == 104 + 64
    assert found.peak == 188 + 32 + 168 + 168


@pytest.mark.parametrize(("copies", "peak"), [(False, 84 + 168 + 104 + 104), (True, 84 + 168 + 104 + 64 + 64)])
def test_gloo_copies_once_more(copies: bool, peak: int) -> None:
    """In a forward: shards, state; the first layer's parameters and buffer, or its buffer, the second's, a copy."""
    step = _step(copies=copies)
    assert predict(replace(step, marks=step.marks[:5]), "fully_shard", sharding=SHARDED).peak == peak


def test_kept_parameters() -> None:
    """Without resharding both layers are whole at the end of the forward, when activations are at most. Both layers are
    unsharded while the second one runs; the buffer of both is kept until the forward ends."""
    kept = predict(_step(1000), "fully_shard", sharding=replace(SHARDED, reshard_after_forward=False))
    assert kept.parameters == 52 + 32 + 104 + 64
    assert kept.peak == kept.parameters + 168 + 64 + 2000
    both = Sharding((ParameterGroup(("layers.0", "layers.1"), (0, 1)),))
    found = predict(_step(1000), "fully_shard", sharding=both)
    assert found.where == "forward of layers.1"
    assert (found.parameters, found.communication, found.activations) == (84 + 168, 168, 2000)


def test_prefetch_holds_one_more_buffer() -> None:
    """While the last layer's backward runs, the first one's parameters are already gathered into a buffer. The program
    asks for the second layer before the first one computes: both buffers, and the first's parameters."""
    prefetched, usual = (
        predict(_step(1000), "fully_shard", sharding=replace(SHARDED, prefetch=ahead)) for ahead in (None, 0)
    )
    assert prefetched.peak == 84 + 64 + 168 + 104 + 2000
    assert usual.peak == 84 + 64 + 168 + 64 + 2000
    step = replace(_step(), marks=_step().marks[:5])
    ahead, usual = (predict(step, "fully_shard", sharding=replace(SHARDED, prefetch=n)) for n in (1, None))
    assert (ahead.communication, ahead.parameters) == (104 + 64, 84 + 104)
    assert ahead.peak == usual.peak + 64 == 84 + 168 + 104 + 104 + 64


def test_more_ranks_divide_shards_alone() -> None:
    """On many ranks parameters, gradients and state approach what a group needs; activations stay."""
    two, many = (predict(_step(1000), "fully_shard", ranks=ranks, sharding=SHARDED) for ranks in (2, 25))
    assert many.optimizer < two.optimizer / 3
    assert many.activations == two.activations


def test_numbered_modules() -> None:
    """The outermost module with a number for a name; a parameter's own name is no module."""
    names = ["embedding.weight", "layers.0.attention.0.weight", "layers.1.weight", "head.0"]
    assert numbered_modules(names) == ("layers.0", "layers.1")


@pytest.mark.parametrize(
    ("strategy", "given", "message"),
    [
        ("fsdp", {}, "there is no strategy 'fsdp'"),
        (
            "fully_shard",
            {"sharding": Sharding((ParameterGroup(("layers.7",), ()),))},
            "no module 'layers.7' was called",
        ),
        ("ddp", {"ranks": 0}, "a world size of 0"),
    ],
)
def test_errors_name_what_is_wrong(strategy: str, given: dict[str, object], message: str) -> None:
    """A wrong strategy, group or world size is named."""
    with pytest.raises(ValueError, match=message):
        predict(_step(), strategy, **given)  # type: ignore[arg-type]
