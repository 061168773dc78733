"""What a backward needs to know: every tensor of an output, and how far the order of arrival has drifted."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from ddp_lab.parallel.core.buckets import OrderFollower, out_of_place
from ddp_lab.parallel.core.outputs import find_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Result:
    loss: Any
    rest: Any = None


class Slotted:
    __slots__ = ("other", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.other = 3


class Plain:
    def __init__(self, tensor: Any) -> None:
        self.held = {"deep": [tensor]}

    @property
    def trap(self) -> None:
        raise AssertionError("a property was called")


class ModelOutput(collections.OrderedDict):  # as Hugging Face's: a dict whose entries are attributes too
    pass


class Registered:
    """Keeps its tensor where only pytree knows to look."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.get = lambda: tensor


torch.utils._pytree.register_pytree_node(
    Registered, lambda value: ([value.get()], None), lambda values, _: Registered(values[0])
)


def test_every_kind_of_container() -> None:
    """Lists, tuples, named tuples, dicts, sets, dataclasses, slots, plain objects and pytree nodes are searched."""
    t = torch.ones(2)
    for output in (
        t, [t], (1, t), Pair(None, t), {"a": {"b": t}}, {t}, frozenset([t]), Result(t), Result(None, [t]), Slotted(t),
        Plain(t), ModelOutput(loss=t), Registered(t), [Result({"x": Slotted(t)})], collections.deque([t]),
    ):  # fmt: skip
        found = find_tensors(output)
        assert len(found) == 1, output
        assert found[0] is t


def test_each_tensor_once() -> None:
    """A tensor that is found twice counts once, in the output's order; objects that hold themselves, and chains without
    end, are searched once and stop."""
    a, b = torch.ones(1), torch.zeros(1)
    assert [id(t) for t in find_tensors({"x": [a, b], "y": a})] == [id(a), id(b)]
    loop: dict[str, Any] = {"tensor": torch.ones(1)}
    loop["self"] = [loop]
    assert len(find_tensors(loop)) == 1
    chain: Any = torch.ones(1)
    for _ in range(5000):
        chain = Plain(chain)
    assert find_tensors(chain) == []
    assert find_tensors([torch.nn.Linear(2, 2), "text", 3, len, torch.float32]) == []


@pytest.mark.parametrize(
    ("arrived", "share"),
    [([0, 1, 2, 3], 0.0), ([1, 2, 3, 0], 0.25), ([3, 0, 1, 2], 0.25), ([3, 2, 1, 0], 0.75), ([], 0.0)],
)
def test_the_share_that_has_to_move(arrived: list[int], share: float) -> None:
    """One late gradient counts once, however late; a reversed order leaves one in place."""
    assert out_of_place(arrived, sorted(arrived)) == share


def test_arguments_are_checked() -> None:
    """A threshold that is no share, or a period below one, raises ValueError."""
    with pytest.raises(ValueError, match="threshold"):
        OrderFollower(1.5, 20)
    with pytest.raises(ValueError, match="every"):
        OrderFollower(0.5, 0)
