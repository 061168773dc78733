"""Which parameters share a bucket: a pure function of their sizes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def assign_buckets(
    sizes: Sequence[int],
    keys: Sequence[Hashable],
    caps: Sequence[int],
    order: Sequence[int] | None = None,
    *,
    alone: Sequence[bool] = (),
    small_last: bool = False,
) -> list[list[int]]:
    """Groups parameters into buckets and returns the buckets in the order of their launch.

    Gradients of one bucket are in one flat buffer, so parameters of different `keys` never share one. A
    bucket is closed as soon as its size reaches its limit, so it may be larger. torch's DDP makes the same
    buckets from the same sizes and limits.

    Args:
        sizes: bytes of each parameter, in the order of registration.
        keys: (dtype, device) of each parameter.
        caps: size limits in bytes; for each key the first is that of its first bucket, and so on; the last repeats.
        order: the parameters' indices in the order in which their gradients become ready; None if that is
            unknown: then the reverse order of registration is used.
        alone: for each parameter whether it needs a bucket of its own (sparse gradients); empty: none does.
        small_last: the limits count from the last bucket (needs an order).

    Returns:
        For each bucket the indices of its parameters.

    Example:
        >>> assign_buckets([4, 4, 4], ["float32"] * 3, [8])
        [[2], [0, 1]]
        >>> assign_buckets([4, 4, 4], ["float32"] * 3, [4, 8], order=[2, 1, 0])
        [[2], [1, 0]]
    """
    _check(sizes, keys, caps, order)
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    for index in _walk(len(sizes), order, small_last):
        if alone and alone[index]:
            closed.append([index])
            continue
        key = keys[index]
        open_buckets.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + sizes[index]
        if filled[key] >= caps[min(count.get(key, 0), len(caps) - 1)]:
            closed.append(open_buckets.pop(key))
            filled[key] = 0
            count[key] = count.get(key, 0) + 1
    closed += open_buckets.values()
    if order is None:
        return sorted(closed, key=min, reverse=True)
    if small_last:
        closed.reverse()
    # A bucket is complete with its last gradient: with several keys that is not the order of closing.
    position = {index: place for place, index in enumerate(order)}
    return sorted(closed, key=lambda bucket: max(position[index] for index in bucket))


def _check(sizes: Sequence[int], keys: Sequence[Hashable], caps: Sequence[int], order: Sequence[int] | None) -> None:
    if len(sizes) != len(keys):
        raise ValueError(f"{len(sizes)} sizes, but {len(keys)} keys")
    if not caps or min(caps) < 0:
        raise ValueError(f"caps must be at least one size in bytes, got {list(caps)}")
    if order is not None and sorted(order) != list(range(len(sizes))):
        raise ValueError(f"order must contain each of the {len(sizes)} parameters once")


def _walk(count: int, order: Sequence[int] | None, backwards: bool) -> Sequence[int]:
    if order is None:
        return range(count)
    return order[::-1] if backwards else order
