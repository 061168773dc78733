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
_MINIMUM_PERCENT = 1.0  # a replay is no better than that
_ALWAYS = 0.9  # share of the steps in which the same parameter is last
_LONG = 0.15  # share of the backward's computation for which it keeps the others waiting


def _caps(facts: Facts) -> list[float]:
    """Caps in bytes as the model has them; without its options what its buckets suggest."""
    told = facts.options.get("bucket_cap_mb_list")
    if told:
        return [float(cap) * _MEBIBYTE for cap in told]
    return [float(max(facts.replay.bytes))]


def _percent(facts: Facts, buckets: Sequence[Sequence[int]]) -> float:
    return facts.percent(facts.replay.with_buckets(buckets))


def _grouped(facts: Facts, order: Sequence[int], caps: Sequence[float]) -> list[list[int]]:
    made = _assigned(tuple(facts.sizes), tuple(facts.keys), tuple(int(cap) for cap in caps), tuple(order))
    return [list(bucket) for bucket in made]


@lru_cache(maxsize=128)  # a live view asks for much the same again and again
def _assigned(
    sizes: tuple[int, ...], keys: tuple[tuple[str, str], ...], caps: tuple[int, ...], order: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(bucket) for bucket in assign_buckets(sizes, keys, caps, order))


def _mebibytes(cap: float) -> str:
    """A cap in MiB with three digits, rounded down: rounded up, a bucket might not be closed where it should."""
    value = cap / _MEBIBYTE
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def _assumption(facts: Facts) -> str:
    line = facts.replay.line
    how = "assumed, as all buckets are of one size" if line.assumed else "fitted to the buckets recorded"
    return f"a collective takes {ms(line.start_ns / 1e6)} + {line.ns_per_byte:.3g} ms a MB, {how}"


def sizes(facts: Facts) -> Iterator[Finding]:
    """Another cap for all buckets, if it gains: at most one finding."""
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
    begins = f"the first is launched {ms(first)} into a backward that computes for {ms(computed)}"
    told = f"{present} bucket{'s' if present > 1 else ''} ({size(total)} in all); {begins}"
    too_big = count > present
    yield Finding(
        kind="bucket-too-big" if too_big else "bucket-too-small",
        title="The buckets are too big: communication starts late and ends after the computation."
        if too_big
        else "The buckets are too small: what each collective costs by itself adds up.",
        evidence=f"{told}. With {count} of about {size(total / best)}, the recorded steps are replayed "
        f"{gained:.1f} % shorter ({_assumption(facts)}).",
        remedy=f"Build the model with bucket_cap_mb={_mebibytes(total / best)}.",
        gain_percent=gained,
    )


def first_bucket(facts: Facts) -> Iterator[Finding]:
    """A smaller first bucket, if that alone gains."""
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
        evidence=f"{idle}: bucket 0 holds {size(facts.replay.bytes[0])}. With a first bucket of {size(best)} the "
        f"recorded steps are replayed {gains[best]:.1f} % shorter.",
        remedy=f"Build the model with bucket_cap_mb_list={caps_mb}.",
        gain_percent=gains[best],
        bucket=0,
    )


def order(facts: Facts) -> Iterator[Finding]:
    """Buckets in the order in which gradients come, if that order has changed and the new one gains."""
    usual = facts.by_readiness
    if usual == [index for bucket in facts.buckets for index in bucket] or facts.steps.on_device:
        return
    gained = _percent(facts, _grouped(facts, usual, _caps(facts)))
    if gained < _MINIMUM_PERCENT:
        return
    place = {index: position for position, index in enumerate(usual)}
    held_up = max(range(len(facts.buckets)), key=lambda b: _reach(facts.buckets[b], place))
    last = max(facts.buckets[held_up], key=lambda index: place[index])
    yield Finding(
        kind="order-changed",
        title="Gradients come in another order than the one the buckets were made for.",
        evidence=f"Bucket {held_up} waits for {facts.names[last]}, which comes at place {place[last] + 1} of "
        f"{len(usual)}, while later buckets are complete. In the present order the recorded steps are replayed "
        f"{gained:.1f} % shorter.",
        remedy="Call model.follow_order(0.1) once on all ranks: it assigns the buckets anew when the order drifts.",
        gain_percent=gained,
        bucket=held_up,
        parameter=facts.names[last],
    )


def _reach(members: Sequence[int], place: dict[int, int]) -> int:
    """Over how many places of the order a bucket reaches, beyond its own number of parameters."""
    places = [place[index] for index in members]
    return max(places) - min(places) - len(places) + 1


def last_parameter(facts: Facts) -> Iterator[Finding]:
    """A parameter that is always the last of its bucket and keeps the others waiting."""
    if facts.steps.on_device:
        return
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
        title=f"{facts.names[parameter]} is always the last gradient of bucket {number} and holds it up.",
        evidence=f"In {100 * share:.0f} % of the steps it comes last, {ms(held / 1e6)} after the others, whose "
        f"{size(rest)} wait for it. With a bucket of its own, the steps are replayed {gained:.1f} % shorter.",
        remedy="Close the bucket before it (bucket_cap_mb_list), or let its gradient come earlier: weights that "
        "are shared by the first and the last layer are complete only at the end of the backward.",
        gain_percent=gained,
        bucket=number,
        parameter=facts.names[parameter],
    )
