"""Findings about how parameters are grouped into buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from ...bucketing import assign_buckets
from ...formatting import ms, size
from .facts import Facts, Finding

__all__ = ["first_bucket", "last_parameter", "order", "sizes"]

_MEBIBYTE = 1 << 20
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MINIMUM_PERCENT = 1.0  # the accuracy of a replay
_ALWAYS = 0.9  # share of the steps in which the same parameter is last
_LONG = 0.15  # share of the backward's computation by which it delays its bucket


def _caps(facts: Facts) -> list[float]:
    """Returns the model's bucket size limits in bytes; without its options, an estimate from its buckets."""
    told = facts.options.get("bucket_cap_mb_list")
    if told:
        return [float(cap) * _MEBIBYTE for cap in told]
    return [float(max(facts.replay.bytes))]


def _percent(facts: Facts, buckets: Sequence[Sequence[int]]) -> float:
    return facts.percent(facts.replay.with_buckets(buckets))


def _grouped(facts: Facts, order: Sequence[int], caps: Sequence[float]) -> list[list[int]]:
    made = _assigned(tuple(facts.sizes), tuple(facts.keys), tuple(int(cap) for cap in caps), tuple(order))
    return [list(bucket) for bucket in made]


@lru_cache(maxsize=128)  # a live view asks for mostly the same layouts again
def _assigned(
    sizes: tuple[int, ...], keys: tuple[tuple[str, str], ...], caps: tuple[int, ...], order: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(bucket) for bucket in assign_buckets(sizes, keys, caps, order))


def _mebibytes(cap: float) -> str:
    """Formats a limit in MiB with three digits, rounded down: rounded up, a bucket could close one parameter later."""
    value = cap / _MEBIBYTE
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def _assumption(facts: Facts) -> str:
    line = facts.replay.line
    how = "assumed, because all buckets have the same size" if line.assumed else "fitted to the recorded buckets"
    return f"a collective takes {ms(line.start_ns / 1e6)} + {line.ns_per_byte * 2**20 / 1e6:.3g} ms per MiB, {how}"


def sizes(facts: Facts) -> Iterator[Finding]:
    """Another size limit for all buckets, if it saves time: at most one finding."""
    total, order_ = sum(facts.replay.bytes), facts.by_readiness
    tried = {parts: _grouped(facts, order_, [total / parts]) for parts in _PARTS}
    gains = {parts: _percent(facts, made) for parts, made in tried.items()}
    best = max(_PARTS, key=gains.__getitem__)
    gained, count = gains[best], len(tried[best])
    present = len(facts.buckets)
    if gained < _MINIMUM_PERCENT or count == present:
        return
    ready = facts.replay.ready().max(axis=0)
    first, computed = float(np.median(ready[:, 0])) / 1e6, float(np.median(facts.replay.computed().max(axis=0))) / 1e6
    begins = f"the first is launched {ms(first)} into a backward of {ms(computed)}"
    told = f"{present} bucket{'s' if present > 1 else ''} ({size(total)} in total); {begins}"
    too_big = count > present
    yield Finding(
        kind="bucket-too-big" if too_big else "bucket-too-small",
        title="The buckets are too big: communication starts late and ends after the computation."
        if too_big
        else "The buckets are too small: the fixed overhead of each collective adds up.",
        evidence=f"{told}. With {count} of about {size(total / best)}, a replay of the recorded steps is "
        f"{gained:.1f} % shorter ({_assumption(facts)}).",
        remedy=f"Build the model with bucket_cap_mb={_mebibytes(total / best)}.",
        gain_percent=gained,
    )


def first_bucket(facts: Facts) -> Iterator[Finding]:
    """A smaller first bucket, if that alone saves time."""
    caps, order_ = _caps(facts), facts.by_readiness
    others = caps[-1] if caps[-1] < sum(facts.replay.bytes) else sum(facts.replay.bytes)
    smaller = [others / part for part in (2, 4, 8, 16, 32)]
    if len(facts.buckets) < 2 or facts.replay.bytes[0] < others / 2:
        return
    gains = {first: _percent(facts, _grouped(facts, order_, [first, others])) for first in smaller}
    best = max(gains, key=lambda first: gains[first])
    if gains[best] < _MINIMUM_PERCENT:
        return
    first_ns = float(np.median(facts.replay.ready().max(axis=0)[:, 0]))
    idle = f"No collective runs in the first {ms(first_ns / 1e6)} of the backward"
    caps_mb = f"[{_mebibytes(best)}, {_mebibytes(others)}]"
    yield Finding(
        kind="first-bucket-late",
        title="The first bucket is launched late.",
        evidence=f"{idle}: bucket 0 holds {size(facts.replay.bytes[0])}. With a first bucket of {size(best)}, a "
        f"replay of the recorded steps is {gains[best]:.1f} % shorter.",
        remedy=f"Build the model with bucket_cap_mb_list={caps_mb}.",
        gain_percent=gains[best],
        bucket=0,
    )


def order(facts: Facts) -> Iterator[Finding]:
    """Buckets in the order in which gradients become ready, if that order has changed and the new one saves time."""
    usual = facts.by_readiness
    if usual == [index for bucket in facts.buckets for index in bucket]:
        return
    gained = _percent(facts, _grouped(facts, usual, _caps(facts)))
    if gained < _MINIMUM_PERCENT:
        return
    place = {index: position for position, index in enumerate(usual)}
    held_up = max(range(len(facts.buckets)), key=lambda b: _reach(facts.buckets[b], place))
    last = max(facts.buckets[held_up], key=lambda index: place[index])
    yield Finding(
        kind="order-changed",
        title="Gradients now become ready in a different order than the bucket layout assumes.",
        evidence=f"Bucket {held_up} waits for {facts.names[last]}, gradient {place[last] + 1} of {len(usual)}, "
        f"while later buckets are ready. With buckets in the current order, a replay of the recorded steps is "
        f"{gained:.1f} % shorter.",
        remedy="Call model.rebuild_buckets_on_reorder(0.1) once on all ranks: buckets then follow the order.",
        gain_percent=gained,
        bucket=held_up,
        parameter=facts.names[last],
    )


def _reach(members: Sequence[int], place: dict[int, int]) -> int:
    """Returns how far the places of a bucket's parameters in the order are spread beyond their number."""
    places = [place[index] for index in members]
    return max(places) - min(places) - len(places) + 1


def last_parameter(facts: Facts) -> Iterator[Finding]:
    """A parameter that is always the last of its bucket and delays it."""
    moments = facts.replay.gradients.max(axis=0)
    computed = float(np.median(facts.replay.computed().max(axis=0)))
    found = []
    for number, members in enumerate(facts.buckets):
        if len(members) < 2:
            continue
        of_bucket = moments[:, list(members)]
        winners = np.bincount(of_bucket.argmax(axis=1), minlength=len(members))
        last = int(winners.argmax())
        share = winners[last] / len(moments)
        if share < _ALWAYS:
            continue
        others = np.delete(of_bucket, last, axis=1).max(axis=1)
        held = float(np.median(of_bucket[:, last] - others))
        if held < _LONG * computed:
            continue
        parameter = members[last]
        split = [list(bucket) for bucket in facts.buckets]
        split[number].remove(parameter)
        after = sum(
            float(np.median(moments[:, list(one)].max(axis=1))) <= np.median(of_bucket[:, last]) for one in split
        )
        split.insert(after, [parameter])
        gained = _percent(facts, split)
        if gained >= _MINIMUM_PERCENT:
            found.append((gained, number, parameter, held, share))
    if not found:
        return
    gained, number, parameter, held, share = max(found)
    rest = facts.replay.bytes[number] - facts.sizes[parameter]
    yield Finding(
        kind="parameter-last",
        title=f"{facts.names[parameter]} is always the last gradient of bucket {number} and delays it.",
        evidence=f"In {100 * share:.0f} % of the steps it is last, {ms(held / 1e6)} after the others, whose "
        f"{size(rest)} wait for it. With a bucket of its own, a replay of the recorded steps is {gained:.1f} % "
        "shorter.",
        remedy="Close the bucket before this parameter (bucket_cap_mb_list), or compute its gradient earlier: a "
        "weight shared by the first and the last layer gets its full gradient only at the end of the backward.",
        gain_percent=gained,
        bucket=number,
        parameter=facts.names[parameter],
    )
