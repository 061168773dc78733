"""Findings about how the model was built: unused parameters, options, what travels, what is copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from ...formatting import ms, names, size
from ..steps import fit_line
from .facts import Facts, Finding

__all__ = ["ALWAYS", "communication", "copies", "search_of_unused", "small_tensors", "unused_parameters"]

ALWAYS: Final = ("find-unused-for-nothing", "static-graph-possible", "unused-parameters")
"""Kinds that are told however little they gain: what is asked for and brings nothing."""

_SEARCH_NS = 500.0  # to find one parameter in the graph: 300 to 600 ns were measured
_EXPOSED_PERCENT = 5.0
_SMALL_BYTES = 16_384
_FEWEST_SMALL = 20
_SLOWEST_COPY = 1.0  # ns a byte: a rank that loses its processor meanwhile seems to copy more slowly


def unused_parameters(facts: Facts) -> Iterator[Finding]:
    """Parameters that never get a gradient, and yet travel."""
    never = np.flatnonzero(~facts.used.any(axis=(0, 1)))
    if not len(never) or facts.steps.on_device:
        return
    replay, gone = facts.replay, set(never.tolist())
    share = []
    for number, members in enumerate(facts.buckets):
        left = sum(facts.sizes[i] for i in members if i not in gone)
        whole = replay.line.time_ns(replay.bytes[number])
        share.append(0.0 if not left else replay.line.time_ns(left) / whole if whole > 0 else 1.0)
    gained = facts.percent(max(0.0, replay.with_service(replay.service * np.asarray(share))))
    of_bytes = sum(facts.sizes[i] for i in gone)
    yield Finding(
        kind="unused-parameters",
        title=f"{len(gone)} parameter{'s' if len(gone) > 1 else ''} never got a gradient.",
        evidence=f"{names([facts.names[i] for i in sorted(gone)])}: {size(of_bytes)} of "
        f"{size(sum(facts.sizes))} travel for nothing in each of the {len(facts.steps)} steps.",
        remedy="Freeze them before wrapping the model (parameter.requires_grad_(False)), or remove them.",
        gain_percent=gained,
        parameter=facts.names[int(never[0])] if len(gone) == 1 else None,
    )


def search_of_unused(facts: Facts) -> Iterator[Finding]:
    """find_unused_parameters that finds nothing, or always the same."""
    if not facts.options.get("find_unused_parameters") or facts.options.get("static_graph"):
        return
    if facts.steps.on_device and facts.steps.gradients.shape[2] == 0:
        return
    used = facts.used
    search = _SEARCH_NS * len(facts.sizes)
    if used.all():
        yield Finding(
            kind="find-unused-for-nothing",
            title="find_unused_parameters=True, and there are none.",
            evidence=f"In {len(facts.steps)} steps on {len(facts.steps.ranks)} ranks all {len(facts.sizes)} "
            f"parameters got a gradient; searching the graph for them takes about {ms(search / 1e6)} a step.",
            remedy="Leave find_unused_parameters out.",
            gain_percent=facts.percent(search),
        )
        return
    if not (used == used[:1, :1]).all():
        return
    saved = search + facts.replay.line.start_ns
    never = int((~used[0, 0]).sum())
    yield Finding(
        kind="static-graph-possible",
        title="The same parameters are unused in every step: the graph can be taken as static.",
        evidence=f"{never} of {len(facts.sizes)} in all {len(facts.steps)} steps on all ranks; searching for them "
        f"and agreeing on them takes about {ms(saved / 1e6)} a step.",
        remedy="Build the model with static_graph=True instead of find_unused_parameters=True, or freeze them.",
        gain_percent=facts.percent(saved),
    )


def communication(facts: Facts) -> Iterator[Finding]:
    """Communication that the computation can't hide."""
    replay = facts.replay
    exposed = replay.base - replay.computed().max(axis=0)
    percent = facts.percent(float(np.median(exposed)))
    if percent < _EXPOSED_PERCENT:
        return
    seldom = percent / 2
    hook = facts.options.get("comm_hook")
    halves = np.asarray([_ratio(replay.line.time_ns(b / 2), replay.line.time_ns(b)) for b in replay.bytes])
    compressed = facts.percent(max(0.0, replay.with_service(replay.service * halves)))
    floats = all("float32" in dtype for dtype, _ in facts.keys)
    remedies = [f"Synchronise every second step only (no_sync() and twice the batch: about {seldom:.1f} %)"]
    if hook is None and floats:
        remedies.insert(0, f"Send half as many bytes (register_comm_hook with fp16_compress_hook: {compressed:.1f} %)")
    else:
        compressed = 0.0
    busy = facts.percent(float(np.median(replay.service.sum(axis=1))))
    yield Finding(
        kind="communication-bound",
        title="Communication takes longer than the backward can hide.",
        evidence=f"{ms(float(np.median(exposed)) / 1e6)} of each step ({percent:.0f} %) lie after the "
        f"backward's computation; collectives run for {busy:.0f} % of it, with {size(sum(replay.bytes))}.",
        remedy="; or: ".join(remedies) + ".",
        gain_percent=max(compressed, seldom),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0


def _handling(facts: Facts) -> tuple[float, float]:
    """What taking in a gradient costs: (ns each, ns a byte), from the last gradient of each bucket."""
    sizes, times = [], []
    for number, members in enumerate(facts.buckets):
        known = [index for index in members if index < facts.steps.gradients.shape[2]]
        if not known:
            continue
        moments = facts.steps.gradients[:, :, known]
        last = moments.max(axis=2)
        took = (facts.steps.ready[:, :, number] - last)[last > 0]
        if len(took):
            sizes.append(float(np.median(np.asarray([facts.sizes[i] for i in known])[moments.argmax(axis=2)])))
            times.append(float(np.median(took)))
    if len(sizes) < 2 or facts.steps.on_device:
        return 0.0, 0.0
    line = fit_line(sizes, times)
    return (0.0, 0.0) if line.assumed else (line.start_ns, line.ns_per_byte)


def copies(facts: Facts) -> Iterator[Finding]:
    """Gradients that are copied into buckets and back."""
    in_place = facts.options.get("gradient_as_bucket_view", True) or facts.options.get("averages_in_place")
    if in_place or facts.steps.on_device:
        return
    _, a_byte = _handling(facts)
    total = sum(facts.sizes)
    tail = float(np.median(facts.replay.tail))
    inward, back = a_byte * total, min(tail, (a_byte or _SLOWEST_COPY) * total)
    takes = f"about {ms(inward / 1e6)} inwards during the backward, and " if inward else ""  # else nobody knows
    saved = back + inward / 2  # a view still has to be divided by the number of ranks
    yield Finding(
        kind="copy-cost",
        title="Gradients are copied into the buckets and back.",
        evidence=f"{size(total)} each way: {takes}{ms(tail / 1e6)} pass between the last bucket and the end of the "
        "backward.",
        remedy="Build the model with gradient_as_bucket_view=True: gradients then live in the buckets (and "
        f"{size(total)} of memory are saved).",
        gain_percent=facts.percent(saved),
    )


def small_tensors(facts: Facts) -> Iterator[Finding]:
    """Many small gradients, each of which costs something by itself."""
    small = [index for index, count in enumerate(facts.sizes) if count <= _SMALL_BYTES]
    each, _ = _handling(facts)
    if len(small) < _FEWEST_SMALL or each <= 0:
        return
    batched = facts.options.get("batched_grad_copy") is False
    yield Finding(
        kind="small-tensors",
        title=f"{len(small)} of {len(facts.sizes)} gradients are smaller than {size(_SMALL_BYTES)}.",
        evidence=f"Taking in a gradient costs {each / 1e3:.1f} µs whatever its size: "
        f"{ms(len(small) * each / 1e6)} a step.",
        remedy=("Build the model with batched_grad_copy=True, or fuse" if batched else "Fuse")
        + " small layers into larger ones (one weight for query, key and value, say).",
        gain_percent=facts.percent(len(small) * each),
    )
