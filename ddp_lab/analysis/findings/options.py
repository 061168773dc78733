"""Findings about how the model was built: unused parameters, options, communication, copies, its device mesh."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

import numpy as np

from ...formatting import counted, ms, names, rate, size
from ..steps import SLOWEST_COPY, fit_line
from .facts import Accumulation, Facts, Finding

__all__ = [
    "ALWAYS",
    "accumulation_words",
    "communication",
    "copies",
    "mesh_between_hosts",
    "reduced_in_each_backward",
    "search_of_unused",
    "small_tensors",
    "unchanged_buffers",
    "unused_parameters",
]

ALWAYS: Final = (
    *("find-unused-for-nothing", "static-graph-possible", "unused-parameters"),
    *("shared-cores", "context-on-other-gpu"),
)
"""Kinds that are reported however little they save: what has no effect, and what is known without an estimate."""

_SEARCH_NS = 500.0  # to find one parameter in the graph; measured: 300 to 600 ns
_EXPOSED_PERCENT = 5.0
_SMALL_BYTES = 16_384
_FEWEST_SMALL = 20
_FASTER_WITHIN = 1.5  # the links within a host than those between hosts, at least
_MESH_PERCENT = 3.0  # of the step that another order of the mesh saves, at least


def unused_parameters(facts: Facts) -> Iterator[Finding]:
    """Parameters that never get a gradient but are communicated."""
    never = np.flatnonzero(~facts.used.any(axis=(0, 1)))
    if not len(never):
        return
    replay, idle = facts.replay, set(never.tolist())
    share = []
    for number, members in enumerate(facts.buckets):
        left = sum(facts.sizes[i] for i in members if i not in idle)
        whole = replay.line.time_ns(replay.bytes[number])
        share.append(0.0 if not left else replay.line.time_ns(left) / whole if whole > 0 else 1.0)
    gained = facts.percent(max(0.0, replay.with_service(replay.service * np.asarray(share))))
    of_bytes = sum(facts.sizes[i] for i in idle)
    yield Finding(
        kind="unused-parameters",
        title=f"{len(idle)} parameter{'s' if len(idle) > 1 else ''} never got a gradient.",
        evidence=f"{names([facts.names[i] for i in sorted(idle)])}: {size(of_bytes)} of "
        f"{size(sum(facts.sizes))} are sent unnecessarily in each of the {len(facts.steps)} steps.",
        remedy="They do not train: look first whether the forward leaves them out, or detaches their results. If that "
        "is meant, freeze them before wrapping the model (parameter.requires_grad_(False)), or remove them.",
        gain_percent=gained,
        parameter=facts.names[int(never[0])] if len(idle) == 1 else None,
    )


def search_of_unused(facts: Facts) -> Iterator[Finding]:
    """find_unused_parameters that finds nothing, or always the same parameters."""
    if not facts.options.get("find_unused_parameters") or facts.options.get("static_graph"):
        return
    if facts.steps.gradients.shape[2] == 0:  # none was recorded
        return
    used = facts.used
    search = _SEARCH_NS * len(facts.sizes)
    if used.all():
        yield Finding(
            kind="find-unused-for-nothing",
            title="find_unused_parameters=True, but every parameter was used.",
            evidence=f"In {len(facts.steps)} steps on {len(facts.steps.ranks)} ranks, all {len(facts.sizes)} "
            f"parameters got a gradient. Searching the graph takes about {ms(search / 1e6)} per step.",
            remedy="Remove find_unused_parameters=True.",
            gain_percent=facts.percent(search),
        )
        return
    if not (used == used[:1, :1]).all():
        return
    saved = search + facts.replay.line.start_ns
    never = int((~used[0, 0]).sum())
    yield Finding(
        kind="static-graph-possible",
        title="The same parameters are unused in every step, so the graph can be treated as static.",
        evidence=f"{never} of {len(facts.sizes)} parameters were unused in all {len(facts.steps)} steps on all ranks. "
        f"Finding them and synchronising the result takes about {ms(saved / 1e6)} per step.",
        remedy="If they are meant not to train, freeze them, or build the model with static_graph=True instead of "
        "find_unused_parameters=True.",
        gain_percent=facts.percent(saved),
    )


def communication(facts: Facts) -> Iterator[Finding]:
    """Communication that does not fit behind the computation."""
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
    remedies = [f"Synchronise only every second step (no_sync() and twice the batch: about {seldom:.1f} %)"]
    if hook is None and floats and not facts.sparse:
        remedies.insert(0, f"Send half as many bytes (register_comm_hook with fp16_compress_hook: {compressed:.1f} %)")
    else:
        compressed = 0.0
    busy = facts.percent(float(np.median(replay.service.sum(axis=1))))
    yield Finding(
        kind="communication-bound",
        title="The backward is too short to overlap all communication.",
        evidence=f"{ms(float(np.median(exposed)) / 1e6)} of each step ({percent:.0f} %) are exposed communication, "
        f"after the backward's computation. Collectives run for {busy:.0f} % of the step, for "
        f"{size(sum(replay.bytes))} of gradients.",
        remedy="; or: ".join(remedies) + ".",
        gain_percent=max(compressed, seldom),
    )


def accumulation_words(found: Accumulation) -> tuple[str, str, float]:
    """Title and evidence of gradients that are reduced in each backward, and the share of reductions not needed."""
    of_one = f"{found.most}" if found.fewest == found.most else f"{found.fewest} to {found.most}"
    title = f"Gradients are reduced in each of the {of_one} backwards of an optimizer step."
    evidence = (
        f"In {counted(found.optimizer_steps, 'optimizer step')} in a row, {found.backwards} backwards added up "
        f"gradients, and each of them reduced them; {found.optimizer_steps} reductions would do."
    )
    return title, evidence, 1 - found.optimizer_steps / found.backwards


def reduced_in_each_backward(facts: Facts) -> Iterator[Finding]:
    """Gradient accumulation without no_sync()."""
    if facts.accumulation is None:
        return
    title, evidence, share = accumulation_words(facts.accumulation)
    exposed = float(np.median(facts.replay.base - facts.replay.computed().max(axis=0)))
    yield Finding(
        kind="reduced-in-each-backward",
        title=title,
        evidence=f"{evidence} Each step here is one backward; {ms(exposed / 1e6)} of it are communication that is "
        "neither overlapped nor a wait for a late rank.",
        remedy="Run all but the last forward and backward of an optimizer step in `with model.no_sync():`.",
        gain_percent=facts.percent(share * exposed),
    )


def unchanged_buffers(facts: Facts) -> Iterator[Finding]:
    """Buffers that each forward broadcasts although they never change."""
    found = facts.unchanged
    if found is None:
        return
    every, count = found.bytes == found.of_bytes, len(found.names)
    which = f"{counted(count, 'buffer')} ({size(found.bytes)}) that {'has' if count == 1 else 'have'} not changed"
    of_which = f"buffers, of which {count} ({size(found.bytes)} of {size(found.of_bytes)}) did not change"
    whole = "Build the model with broadcast_buffers=False (forward_sync_buffers=False where torch has that)"
    ignore = "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)"
    part = f"Leave them out of it (call {ignore} before)"
    yield Finding(
        kind="unchanged-buffers",
        title=f"Each forward waits {ms(found.ns / 1e6)} for the broadcast of {which if every else of_which}: "
        f"{names(found.names)}.",
        evidence=f"On all ranks they had the same values in {found.looks} looks, the last at step {found.step}.",
        remedy=f"{whole if every else part}, or keep constants as plain attributes instead of buffers.",
        gain_percent=facts.percent(found.ns * found.bytes / found.of_bytes),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0


def _handling(facts: Facts) -> tuple[float, float]:
    """Returns the cost of copying a gradient into its bucket: (ns each, ns per byte), from each bucket's last one."""
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
    if len(sizes) < 2:
        return 0.0, 0.0
    line = fit_line(sizes, times)
    return (0.0, 0.0) if line.assumed else (line.start_ns, line.ns_per_byte)


def copies(facts: Facts) -> Iterator[Finding]:
    """Gradients that are copied into buckets and back."""
    in_place = facts.options.get("gradient_as_bucket_view", True) or facts.options.get("averages_in_place")
    if in_place:
        return
    _, a_byte = _handling(facts)
    total = sum(facts.sizes)
    tail = float(np.median(facts.replay.tail))
    inward, back = a_byte * total, min(tail, (a_byte or SLOWEST_COPY) * total)
    takes = f"copying in takes about {ms(inward / 1e6)} of the backward; " if inward else ""  # else it is not known
    saved = back + inward / 2  # a view must still be divided by the number of ranks
    yield Finding(
        kind="copy-cost",
        title="Gradients are copied into the buckets and back.",
        evidence=f"{size(total)} each way: {takes}{ms(tail / 1e6)} pass between the last all-reduce and the end of "
        "the backward.",
        remedy="Build the model with gradient_as_bucket_view=True: gradients are then views of the buckets, which "
        f"also saves {size(total)} of memory.",
        gain_percent=facts.percent(saved),
    )


def small_tensors(facts: Facts) -> Iterator[Finding]:
    """Many small gradients, each with a fixed overhead."""
    small = [index for index, count in enumerate(facts.sizes) if count <= _SMALL_BYTES]
    each, _ = _handling(facts)
    if len(small) < _FEWEST_SMALL or each <= 0:
        return
    batched = facts.options.get("batched_grad_copy") is False
    yield Finding(
        kind="small-tensors",
        title=f"{len(small)} of {len(facts.sizes)} gradients are smaller than {size(_SMALL_BYTES)}.",
        evidence=f"Copying a gradient into its bucket has a fixed overhead of {each / 1e3:.1f} µs: "
        f"{ms(len(small) * each / 1e6)} per step.",
        remedy=("Build the model with batched_grad_copy=True, or fuse" if batched else "Fuse")
        + " small layers into larger ones (for example, one weight for query, key and value).",
        gain_percent=facts.percent(len(small) * each),
    )


def mesh_between_hosts(facts: Facts) -> Iterator[Finding]:
    """A dimension that crosses the network, though it sends more than another one that does not.

    If both changed places, each would send its bytes at the rate of the other one. At most the waits are saved: where
    they are not known (NCCL, but for `fully_shard`), nothing is found.
    """
    for outer, inner in product(facts.dimensions, facts.dimensions):
        if not (outer.between_hosts and not inner.between_hosts and outer.bytes > inner.bytes > 0):
            continue
        slow, fast = outer.bytes / outer.ns, inner.bytes / inner.ns  # bytes per ns are GB/s
        saved = (outer.bytes - inner.bytes) * (1 / slow - 1 / fast)
        gain = facts.percent(min(saved, outer.waited_ns))
        if fast < _FASTER_WITHIN * slow or gain < _MESH_PERCENT:
            continue
        yield Finding(
            kind="mesh-dimension-between-hosts",
            title=f"The mesh dimension {outer.name} sends more than {inner.name}, but its ranks are on several hosts.",
            evidence=f"In each step it sends {size(outer.bytes)} over each link at {rate(slow)} and {inner.name} "
            f"{size(inner.bytes)} at {rate(fast)}; a rank waits {ms(outer.waited_ns / 1e6)} for it.",
            remedy=f"Make {outer.name} the last dimension of init_device_mesh(), whose ranks are neighbours, and "
            "number the ranks host by host.",
            gain_percent=gain,
        )
        return
