"""A call's arguments, split over devices, and its results, joined again: through tuples, lists, dicts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .devices import Device
from .functions import Gather, Scatter

__all__ = ["gather", "scatter", "scatter_kwargs"]


def scatter(inputs: Any, target_gpus: Sequence[Device], dim: int = 0) -> Any:
    """Splits all tensors in `inputs` along `dim`, one piece for each device.

    Args:
        inputs: a tensor, or tuples, named tuples, lists and dicts (also subclasses of them) of tensors. Anything
            else, also an empty container, goes to each device by reference.
        target_gpus: accelerators or CPU devices.
        dim: the dimension to split.

    Returns:
        For each device the structure of `inputs`, with its pieces; as many as the shortest tensor has pieces.
    """
    if isinstance(inputs, torch.Tensor):
        return Scatter.apply(target_gpus, None, dim, inputs)  # type: ignore[no-untyped-call]
    if isinstance(inputs, (tuple, list)) and len(inputs):
        parts = _together([scatter(item, target_gpus, dim) for item in inputs])
        if _is_namedtuple(inputs):
            return [type(inputs)(*part) for part in parts]
        return [tuple(part) if isinstance(inputs, tuple) else part for part in parts]
    if isinstance(inputs, dict) and inputs:
        parts = _together([scatter(value, target_gpus, dim) for value in inputs.values()])
        return [type(inputs)(zip(inputs, part, strict=True)) for part in parts]
    return [inputs for _ in target_gpus]


def _together(columns: list[Sequence[Any]]) -> list[list[Any]]:
    return [list(row) for row in zip(*columns, strict=False)]


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, target_gpus: Sequence[Device], dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Splits positional and keyword arguments of a call.

    Args:
        inputs: positional arguments.
        kwargs: keyword arguments.
        target_gpus: accelerators or CPU devices.
        dim: the dimension to split.

    Returns:
        Positional and keyword arguments for each device, the same number of both, padded with ``()`` and ``{}``.
        Arguments without tensors go to as many devices as the tensors. Without any argument both are empty.

    Warns:
        UserWarning: tensors of one call have different numbers of pieces, so that some of these are lost.
    """
    pieces = {min(len(target_gpus), size) for size in _sizes((inputs, kwargs), dim) if size}
    if len({_chunks(size, len(target_gpus)) for size in pieces}) > 1:
        warnings.warn(
            f"DataParallel: the tensors of this call have different sizes in dimension {dim} and split into different "
            f"numbers of pieces on {len(target_gpus)} devices; surplus pieces are dropped. Give all tensors "
            "the same batch size, or wrap those that should not be split in an object that is not a container",
            stacklevel=3,
        )
    positional = list(scatter(inputs, target_gpus, dim)) if inputs else []
    named = list(scatter(kwargs, target_gpus, dim)) if kwargs else []
    if not any(True for _ in _sizes(kwargs, dim)) and positional:
        del named[len(positional) :]
    if not any(True for _ in _sizes(inputs, dim)) and named:
        del positional[len(named) :]
    positional += [()] * (len(named) - len(positional))
    named += [{}] * (len(positional) - len(named))
    return tuple(positional), tuple(named)


def _chunks(size: int, count: int) -> int:
    """How many pieces `torch.chunk` makes of a length."""
    return -(-size // -(-size // count))


def _sizes(value: Any, dim: int) -> Iterator[int]:
    """The lengths along `dim` of all tensors that `scatter` splits."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield value.size(dim)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _sizes(item, dim)
    elif isinstance(value, dict):
        yield from _sizes(list(value.values()), dim)


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Joins the outputs of the devices.

    Args:
        outputs: one for each device, all with the same structure: tensors, or tuples, named tuples, lists, dicts and
            dataclasses (also subclasses) of them, or None.
        target_device: where the result is wanted, "cpu" for the CPU.
        dim: the dimension along which tensors are joined; scalars become a vector, with a warning.

    Returns:
        The same structure with joined tensors.

    Raises:
        ValueError: containers of different lengths, or dicts with different keys.
        TypeError: an output can't be joined.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return Gather.apply(target_device, dim, *outputs)  # type: ignore[no-untyped-call]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return type(first)(  # type: ignore[call-arg]
            (key, gather(column, target_device, dim)) for key, column in _columns(outputs).items()
        )
    if dataclasses.is_dataclass(first):
        build: Any = type(first)
        names = [field.name for field in dataclasses.fields(build)]
        return build(**{n: gather([getattr(out, n) for out in outputs], target_device, dim) for n in names})
    if isinstance(first, (str, bytes)) or not hasattr(type(first), "__iter__"):
        raise TypeError(
            "DataParallel can gather tensors, None, and containers of them from the replicas, but the module returned "
            f"{type(first).__name__}: return it as a tensor with one element for each sample"
        )
    joined = (gather(column, target_device, dim) for column in zip(*outputs, strict=True))
    return type(first)._make(joined) if _is_namedtuple(first) else type(first)(joined)


def _columns(outputs: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    keys = list(outputs[0])
    for index, output in enumerate(outputs):
        if len(output) != len(keys):
            raise ValueError(
                f"All dicts must have the same number of keys, but replica 0 returned {sorted(map(str, keys))} and "
                f"replica {index} {sorted(map(str, output))}"
            )
    return {key: [output[key] for output in outputs] for key in keys}


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")
