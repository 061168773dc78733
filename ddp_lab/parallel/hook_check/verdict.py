"""The results of the ranks' trials of a comm hook: numbers of one rank, then problems from the numbers of all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import torch

from ...analysis.check_reports import BucketCheck, HookProblem
from ...formatting import label_of
from .cases import Case
from .trial import Trial, traffic

__all__ = ["bucket_check", "measure", "merged", "problems"]

_CLOSE: Final = 0.1  # relative
_FAR: Final = 0.5

# kind -> what to do
_REMEDIES: Final = {
    "raises": "In a backward, that rank would raise it while the others wait. Debug it with this check on one bucket.",
    "fails later": "It was raised in a then() or in the collective; a backward would raise it at its end.",
    "no future": "Return a torch.futures.Future: work.get_future(), the result of its then(), or your own.",
    "no tensor": "The future must contain one tensor: in then(), return fut.value()[0] or the tensor that you filled.",
    "wrong size": "Return as many elements as bucket.buffer() has; decompress in then().",
    "wrong device": "Return the result on the device of bucket.buffer().",
    "never completes": "Complete the future on every rank, and enter the same collectives in the same order on all "
    "ranks. The process group still has unfinished collectives: restart the ranks before you use it again.",
    "never ends": "Make the hook return at once (async_op=True) and do the rest in then(). The process group still has "
    "unfinished collectives: restart the ranks before you use it again.",
    "deadlock in flight": "One bucket alone works. With several, the hook waits (fut.wait(), or a collective without "
    "async_op) in a then() on a thread that the collectives of the others need: chain futures instead of waiting, or "
    "use one bucket (bucket_cap_mb larger than the model). The process group still has unfinished collectives: restart "
    "the ranks before you use it again.",
    "converted": "Copy the result into bucket.buffer(), or convert it; else the reducer converts it with a warning.",
    "ranks differ": "Every rank must compute the same bits, or the replicas diverge: use no rank-specific random "
    "numbers, order or error feedback after the communication. For methods that average parameters later (local SGD), "
    "pass expect_equal=False.",
    "not divided": "Divide by the number of ranks: a hook gets undivided gradients.",
    "divided twice": "Divide by the number of ranks once.",
    "not averaged": "The result is this rank's own gradient: nothing was communicated.",
    "far from the mean": "For a lossy hook this can be normal on random gradients, which no method compresses well, if "
    "the accumulated error shrinks (error feedback) and training goes well. Otherwise look for a bug.",
    "inexact": "The error exceeds the requested tolerance.",
    "zeros broken": "Gradients of zeros must give zeros: do not divide by a norm or range that may be 0.",
    "hides non-finite": "NaN and Inf in a rank's gradients are not visible after the hook, so that loss scaling and "
    "monitoring can't detect them.",
    "fails in training": "It works on single buckets: check the state that it keeps between steps by bucket.index(). "
    "Buckets are rebuilt after the first backward, and the same index then means other parameters.",
    "training diverges": "The same steps with the plain average have a finite loss.",
    "learns less": "Compression costs some accuracy; try a milder one, or error feedback.",
}
_WRONG_FACTOR: Final = {"not divided", "divided twice", "not averaged"}
_WARNINGS: Final = {"converted", "far from the mean", "hides non-finite", "learns less"}


def problem(kind: str, what: str, *, mild: bool = False) -> HookProblem:
    """A problem with its remedy."""
    return HookProblem(kind, what, _REMEDIES[kind], "warning" if mild or kind in _WARNINGS else "error")


def measure(trial: Trial, ranks: int) -> dict[str, Any]:
    """A rank's results for the others: JSON."""
    case = trial.case
    made: dict[str, Any] = {"broken": trial.broken, "converted": trial.converted}
    if trial.broken is not None:
        return made
    used = traffic(trial.collectives)
    count = case.buckets * case.rounds
    made |= {
        "digests": [[_digest(value) for value in values] for values in trial.values],
        "spans": [median(spans) for spans in zip(*trial.spans, strict=True)],
        "payload": used.payload / count,
        "wire": used.wire / count,
        "operators": {name: number / count for name, number in used.operators.items()},
        "finite": all(bool(torch.isfinite(value).all()) for values in trial.values for value in values),
        "largest_value": max(float(value.abs().max()) for values in trial.values for value in values),
    }
    if case.content == "random":
        made |= _accuracy(trial, ranks)
    return made


def _digest(value: torch.Tensor) -> str:
    plain = torch.where(torch.isnan(value), torch.full_like(value, math.nan), value)  # NaNs have payloads
    return hashlib.blake2b(plain.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def _accuracy(trial: Trial, ranks: int) -> dict[str, Any]:
    """Errors, the worst over the buckets, and the first round's result compared with the mean."""
    found, case = [], trial.case
    for index in range(case.buckets):
        mean = case.mean(ranks, index)
        first = trial.values[0][index].double()
        whole = sum((values[index].double() for values in trial.values), torch.zeros_like(mean)) / case.rounds
        parts = case.gradients(trial.rank, index, torch.device("cpu"))
        own = torch.cat([part.reshape(-1) for part in parts])
        scale = float(first @ mean / (mean @ mean))
        found.append(
            {
                "error": _relative(first, mean),
                "largest": float((first - mean).abs().max() / mean.abs().max()),
                "accumulated": _relative(whole, mean),
                "scale": scale,
                "aligned": _relative(first, scale * mean) < _CLOSE if scale else False,
                "own": ranks > 1 and bool(torch.equal(trial.values[0][index], own)),
            }
        )
    worst = max(found, key=lambda one: one["error"])
    return worst | {"accumulated": max(one["accumulated"] for one in found)}


def _relative(value: torch.Tensor, mean: torch.Tensor) -> float:
    return float((value - mean).norm() / mean.norm())


def bucket_check(case: Case, answers: Sequence[dict[str, Any]]) -> BucketCheck | None:
    """The entry of the report; None if a rank has no result."""
    if any(one["broken"] for one in answers):
        return None
    spans = [max(span) / 1e6 for span in zip(*(one["spans"] for one in answers), strict=True)]
    size = torch.empty(0, dtype=case.dtype).element_size() * case.numel

    def worst(key: str) -> float:
        return float(max(one.get(key, math.nan) for one in answers))

    return BucketCheck(
        name=case.name,
        dtype=str(case.dtype).removeprefix("torch."),
        numel=case.numel,
        buffer_bytes=size,
        in_flight=case.buckets,
        error=worst("error"),
        largest_error=worst("largest"),
        accumulated_error=worst("accumulated"),
        equal=_equal(answers),
        payload_bytes=worst("payload"),
        wire_bytes=worst("wire"),
        collectives=answers[0]["operators"],
        encode_ms=spans[0],
        communicate_ms=spans[1],
        decode_ms=spans[2],
        copy_ms=spans[3],
    )


def _equal(answers: Sequence[dict[str, Any]]) -> bool:
    return all(one["digests"] == answers[0]["digests"] for one in answers)


def problems(
    case: Case, answers: Sequence[dict[str, Any]], *, tolerance: float | None, expect_equal: bool
) -> list[HookProblem]:
    """The problems of one case, from the numbers of all ranks."""
    mild = not case.primary
    broken = [(rank, *one["broken"]) for rank, one in enumerate(answers) if one["broken"]]
    if broken:
        return [_broken(case, broken, len(answers), mild)]
    found = []
    converted = [one["converted"] for one in answers if one["converted"]]
    if converted:
        found.append(problem("converted", f"{case.name}: the result is {converted[0]}."))
    if not _equal(answers) and expect_equal:
        found.append(problem("ranks differ", f"{case.name}: {_groups(answers)} have different results.", mild=mild))
    if case.content == "random":
        found += _wrong_average(case, answers, tolerance, mild)
    elif case.content == "zeros":
        largest = max(one["largest_value"] for one in answers)
        if largest != 0:  # NaN, too
            found.append(problem("zeros broken", f"{case.name}: the largest element of the result is {largest:.3g}."))
    elif any(one["finite"] for one in answers):
        found.append(problem("hides non-finite", f"{case.name} in rank 0's gradient: the result is finite."))
    return found


def _broken(case: Case, broken: list[tuple[int, str, str]], ranks: int, mild: bool) -> HookProblem:
    """The cause, if some ranks only waited for another."""
    waiting = {"never completes", "never ends"}
    causes = [one for one in broken if one[1] not in waiting] or broken
    kind, what = causes[0][1], causes[0][2]
    if kind in waiting and case.buckets > 1:
        kind = "deadlock in flight"
    who = [rank for rank, *_ in causes]
    others = [rank for rank, *_ in broken if rank not in who]
    also = f" {label_of(others).capitalize()} waited for it without success." if others else ""
    return problem(kind, f"{case.name}, {_on(who, ranks)}: {what}.{also}", mild=mild and not others)


def _wrong_average(
    case: Case, answers: Sequence[dict[str, Any]], tolerance: float | None, mild: bool
) -> list[HookProblem]:
    ranks = len(answers)
    error = max(one["error"] for one in answers)
    scale = answers[0]["scale"]
    if ranks > 1 and case.numel > 1:
        if any(one["own"] for one in answers):
            who = [rank for rank, one in enumerate(answers) if one["own"]]
            return [
                problem(
                    "not averaged", f"{case.name}, {_on(who, ranks)}: it equals the rank's own gradient.", mild=mild
                )
            ]
        for kind, factor in (("not divided", float(ranks)), ("divided twice", 1 / ranks)):
            if all(one["aligned"] for one in answers) and abs(scale / factor - 1) < _CLOSE / 2:
                return [problem(kind, f"{case.name}: the result is {scale:.3g} times the mean over {ranks} ranks.")]
    if tolerance is not None and not error <= tolerance:
        return [problem("inexact", f"{case.name}: relative error {error:.2e}, tolerance {tolerance:.2e}.", mild=mild)]
    if tolerance is None and not error <= _FAR:
        accumulated = max(one["accumulated"] for one in answers)
        told = f"relative error {error:.2g} after one round, {accumulated:.2g} accumulated over {case.rounds}"
        return [problem("far from the mean", f"{case.name}: {told}.")]
    return []


def merged(found: Sequence[HookProblem]) -> tuple[HookProblem, ...]:
    """One problem of each kind and severity, errors first, with the number of further cases."""
    kinds: dict[tuple[str, str], list[HookProblem]] = {}
    explained = any(one.kind in _WRONG_FACTOR for one in found)
    for one in found:
        if explained and one.kind == "far from the mean":
            continue
        kinds.setdefault((one.severity, one.kind), []).append(one)
    made = []
    for (severity, kind), same in sorted(kinds.items(), key=lambda item: item[0][0]):
        if severity == "warning" and ("error", kind) in kinds:
            continue
        more = f" (Also in {len(same) - 1} more cases.)" if len(same) > 1 else ""
        made.append(HookProblem(kind, same[0].what + more, same[0].remedy, same[0].severity))
    return tuple(made)


def _groups(answers: Sequence[dict[str, Any]]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, one in enumerate(answers):
        holders.setdefault(str(one["digests"]), []).append(rank)
    return " and ".join(map(label_of, holders.values()))


def _on(who: Sequence[int], ranks: int) -> str:
    return "all ranks" if len(who) == ranks else label_of(who)
