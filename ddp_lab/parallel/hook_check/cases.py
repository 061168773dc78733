"""The test cases of a comm hook: equal buckets on all ranks, of gradients that each can compute; and a state."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...formatting import counted

__all__ = ["Case", "cases", "copy_of_state"]

Shapes = tuple[tuple[int, ...], ...]
Content = Literal["random", "zeros", "NaN", "Inf"]

MATRICES: Shapes = ((64, 32), (32,), (16, 8, 3))
SHAPES: tuple[Shapes, ...] = (MATRICES, ((1,),), ((7,), (3, 5)), ((512, 512), (512,)))
ROUNDS = 4


@dataclass(frozen=True)
class Case:
    """One kind of bucket.

    Attributes:
        dtype: of the gradients.
        shapes: of a bucket's parameters.
        content: of the gradients; "NaN" and "Inf": one element of the first rank's.
        buckets: number in flight at once.
        rounds: number of repetitions with the same gradients.
        primary: False: a dtype that the caller did not request, so that a failure is only a warning.
    """

    dtype: torch.dtype
    shapes: Shapes
    content: Content = "random"
    buckets: int = 1
    rounds: int = ROUNDS
    primary: bool = True

    @property
    def numel(self) -> int:
        """Elements of a bucket."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def name(self) -> str:
        """Its name in messages."""
        content = "" if self.content == "random" else f", {self.content}"
        flight = f", {self.buckets} in flight" if self.buckets > 1 else ""
        return f"{str(self.dtype).removeprefix('torch.')}, {counted(self.numel, 'element')}{content}{flight}"

    def gradients(self, rank: int, bucket: int, device: torch.device) -> list[torch.Tensor]:
        """One rank's gradients of one bucket, of the case's shapes and dtype."""
        generator = torch.Generator().manual_seed(1_000_003 * rank + 101 * bucket + self.numel)
        made = [torch.randn(shape, generator=generator) * (1 + 0.5 * rank) for shape in self.shapes]
        if self.content == "zeros":
            made = [torch.zeros(shape) for shape in self.shapes]
        elif self.content != "random" and rank == 0:
            made[0].view(-1)[0] = math.nan if self.content == "NaN" else math.inf
        return [gradient.to(self.dtype).to(device) for gradient in made]

    def mean(self, ranks: int, bucket: int) -> torch.Tensor:
        """The exact average over the ranks, flat, float64."""
        total = torch.zeros(self.numel, dtype=torch.float64)
        for rank in range(ranks):
            parts = self.gradients(rank, bucket, torch.device("cpu"))
            total += torch.cat([part.reshape(-1) for part in parts]).double()
        return total / ranks


def cases(dtypes: Sequence[torch.dtype], in_flight: int, *, others: bool) -> Iterator[Case]:
    """The cases, the simplest first, those that may deadlock last.

    Args:
        dtypes: the requested ones; the first is tried in all sizes.
        in_flight: buckets at once in the last case; 1 skips it.
        others: whether to try also dtypes that were not requested.
    """
    first = dtypes[0]
    yield from (Case(first, shapes) for shapes in SHAPES)
    yield from (Case(dtype, MATRICES) for dtype in dtypes[1:])
    yield Case(first, MATRICES, "zeros")
    if others:
        further = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        yield from (Case(dtype, MATRICES, primary=False) for dtype in further if dtype not in dtypes)
    yield Case(first, MATRICES, "NaN", rounds=1)
    yield Case(first, MATRICES, "Inf", rounds=1)
    if in_flight > 1:
        yield Case(first, MATRICES, buckets=in_flight)


def copy_of_state(state: object) -> tuple[object, bool]:
    """A copy of the state, which a hook may change, and whether it could be made.

    Process groups in it stay what they are. Attributes are copied one by one, as pickling would leave groups out.
    """
    memo: dict[int, Any] = {}
    _keep_groups(state, memo, 0)
    if isinstance(state, dist.ProcessGroup):
        return state, True
    try:
        if type(state).__module__ == "builtins":
            return copy.deepcopy(state, memo), True
        made = object.__new__(type(state))
        for name, value in _attributes(state).items():
            object.__setattr__(made, name, copy.deepcopy(value, memo))
    except Exception:  # noqa: BLE001 - whatever a class of the user's raises: it can't be copied
        return state, False
    return made, True


def _attributes(state: object) -> dict[str, Any]:
    slots = [name for kind in type(state).__mro__ for name in _slots(kind)]
    named = {name: getattr(state, name) for name in slots if hasattr(state, name)}
    return named | dict(getattr(state, "__dict__", {}))


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _keep_groups(value: object, memo: dict[int, Any], depth: int) -> None:
    if isinstance(value, dist.ProcessGroup):
        memo[id(value)] = value
    elif depth < 3:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
        for each in inner if inner is not None else _attributes(value).values():
            _keep_groups(each, memo, depth + 1)
