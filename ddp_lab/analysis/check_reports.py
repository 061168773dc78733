"""Results of checks on all ranks: of a comm hook (`check_hook`; as text and HTML), of replicas (`check_drift`)."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..formatting import counted, ms, names, size

__all__ = ["BucketCheck", "DriftReport", "HookProblem", "HookReport", "TrainingCheck"]


@dataclass(frozen=True)
class HookProblem:
    """One problem, or possible problem, of a hook.

    Attributes:
        kind: stable identifier, e.g. ``"not divided"``.
        what: what was found, with numbers, buckets and ranks.
        remedy: what to do.
        severity: ``"error"``: training with the hook is wrong; ``"warning"``: it may be intended.
    """

    kind: str
    what: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.severity.upper()} {self.kind}: {self.what} {self.remedy}"


@dataclass(frozen=True)
class BucketCheck:
    """The hook on one kind of bucket. Times are medians over buckets and rounds, of the slowest rank.

    Attributes:
        name: e.g. ``"float32, 2,464 elements"``.
        dtype: of the gradients.
        numel: elements of a bucket.
        buffer_bytes: of a bucket's buffer.
        in_flight: buckets in flight at the same time.
        error: ‖result - mean‖ / ‖mean‖ in the first round, the largest of all ranks; NaN if there was no result.
        largest_error: the largest single deviation, divided by the mean's largest element.
        accumulated_error: `error` for the sums over all rounds, each with the same gradients; error feedback makes it
            small.
        equal: whether all ranks have the same bits.
        payload_bytes: measured bytes that a rank passed to collectives for one bucket.
        wire_bytes: bytes that a rank sends for that payload with bandwidth-optimal algorithms (computed).
        collectives: operator -> number per bucket.
        encode_ms: time until the hook returned.
        communicate_ms: from then until its last collective was complete; without one, until its future was.
        decode_ms: from then until its future was complete (the cost of `then()`).
        copy_ms: time to copy the result to the gradients.
    """

    name: str
    dtype: str
    numel: int
    buffer_bytes: int
    in_flight: int
    error: float
    largest_error: float
    accumulated_error: float
    equal: bool
    payload_bytes: float
    wire_bytes: float
    collectives: dict[str, float]
    encode_ms: float
    communicate_ms: float
    decode_ms: float
    copy_ms: float


@dataclass(frozen=True)
class TrainingCheck:
    """Some training steps with the hook, compared with the same steps with the plain average.

    Attributes:
        model: class name.
        losses: by step, with the hook, averaged over the ranks.
        plain_losses: the same with the plain average.
        step_ms: median step time with the hook, on the slowest rank.
        plain_step_ms: the same with the plain average.
        payload_bytes: measured bytes per step that a rank passed to collectives, with the hook.
        plain_payload_bytes: the same with the plain average.
        equal: whether all ranks have the same parameters at the end.
    """

    model: str
    losses: tuple[float, ...]
    plain_losses: tuple[float, ...]
    step_ms: float
    plain_step_ms: float
    payload_bytes: float
    plain_payload_bytes: float
    equal: bool


@dataclass(frozen=True, repr=False)
class HookReport:
    """The result of a check of a comm hook, the same on all ranks; text when printed, HTML in a notebook.

    Attributes:
        hook: its name.
        ranks: how many ranks took part.
        backend: the backend of their process group.
        buckets: one entry for each kind of bucket that was tried.
        training: None if the check ended before the training.
        problems: errors first.
        notes: what was not checked or was estimated, and why.
    """

    hook: str
    ranks: int
    backend: str
    buckets: tuple[BucketCheck, ...]
    training: TrainingCheck | None
    problems: tuple[HookProblem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings."""
        return not any(problem.severity == "error" for problem in self.problems)

    @property
    def verdict(self) -> str:
        """One sentence."""
        errors = sum(problem.severity == "error" for problem in self.problems)
        warnings = len(self.problems) - errors
        found = [f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
        return f"The comm hook '{self.hook}' on {self.ranks} ranks ({self.backend}): {' and '.join(found) or 'ok'}."

    def __str__(self) -> str:
        lines = [self.verdict, *(f"  {problem}" for problem in self.problems)]
        if self.buckets:
            rows = [_HEAD, *(_row(one) for one in self.buckets)]
            widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
            lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        if self.training is not None:
            lines.append(_training_words(self.training))
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(self.verdict)}</b></p>"]
        if self.problems:
            parts.append("<ul>" + "".join(_problem_html(problem) for problem in self.problems) + "</ul>")
        if self.buckets:
            parts.append(_table(_HEAD, [_row(one) for one in self.buckets]))
        if self.training is not None:
            parts.append(f"<p>{html.escape(_training_words(self.training))}</p>{_curves(self.training)}")
        parts += [f"<p><small>{html.escape(note)}</small></p>" for note in self.notes]
        return '<div class="ddp-lab-hook-report">' + "".join(parts) + "</div>"


_HEAD = (
    "bucket", "error", "largest", "accumulated", "ranks", "buffer", "payload", "on the wire", "encode",
    "communicate", "decode", "copy",
)  # fmt: skip


def _row(one: BucketCheck) -> tuple[str, ...]:
    return (
        one.name,
        *(_error(value) for value in (one.error, one.largest_error, one.accumulated_error)),
        "equal" if one.equal else "DIFFER",
        size(one.buffer_bytes),
        size(one.payload_bytes),
        size(one.wire_bytes),
        *(_ms(value) for value in (one.encode_ms, one.communicate_ms, one.decode_ms, one.copy_ms)),
    )


def _error(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "-"


def _ms(value: float) -> str:
    return ms(value) if math.isfinite(value) else "-"


def _training_words(training: TrainingCheck) -> str:
    losses, plain = (f"{of[0]:.4g} -> {of[-1]:.4g}" for of in (training.losses, training.plain_losses))
    return (
        f"Training ({training.model}, {len(training.losses)} steps): loss {losses}, plain average {plain}; parameters "
        f"{'equal' if training.equal else 'DIFFER'} between the ranks; step {ms(training.step_ms)}, plain "
        f"{ms(training.plain_step_ms)}; payload per step {size(training.payload_bytes)}, plain "
        f"{size(training.plain_payload_bytes)}."
    )


def _problem_html(problem: HookProblem) -> str:
    what, remedy = html.escape(problem.what), html.escape(problem.remedy)
    return f"<li><b>{problem.severity}: {html.escape(problem.kind)}.</b> {what} <i>{remedy}</i></li>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str, style: str) -> str:
        sides = ["left", *["right"] * (len(cells) - 1)]
        made = [
            f"<{tag} style='text-align:{side};{style}'>{html.escape(cell)}</{tag}>"
            for side, cell in zip(sides, cells, strict=True)
        ]
        return f"<tr>{''.join(made)}</tr>"

    top = line(head, "th", "vertical-align:bottom")
    body = "".join(line(row, "td", "white-space:nowrap") for row in rows)
    return f"<div style='overflow-x:auto'><table><thead>{top}</thead><tbody>{body}</tbody></table></div>"


_WIDTH, _HEIGHT = 420, 140


def _curves(training: TrainingCheck) -> str:
    """Both losses over the steps, as SVG; they differ in dashes as well as in colour."""
    finite = [loss for loss in (*training.losses, *training.plain_losses) if math.isfinite(loss)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)

    def line(losses: Sequence[float], style: str) -> str:
        across = _WIDTH / max(1, len(losses) - 1)
        points = " ".join(
            f"{i * across:.1f},{_HEIGHT - (loss - low) / ((high - low) or 1) * _HEIGHT:.1f}"
            for i, loss in enumerate(losses)
            if math.isfinite(loss)
        )
        return f'<polyline points="{points}" fill="none" stroke-width="2" {style}/>'

    label = f"Loss by step, {low:.4g} to {high:.4g}: with the hook (solid) and with the plain average (dashed)"
    plain = line(training.plain_losses, 'stroke="#999999" stroke-dasharray="6 4"')
    hook = line(training.losses, 'stroke="#0072B2"')
    return (
        f'<figure><svg role="img" aria-label="{label}" viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}" width="{_WIDTH}">'
        f"{plain}{hook}</svg><figcaption>{label}.</figcaption></figure>"
    )


@dataclass(frozen=True, repr=False)
class DriftReport:
    """Whether all ranks hold the same parameters and buffers, bit by bit; the same on all ranks.

    Attributes:
        ok: whether nothing differs.
        step: the number of the model's synchronised backwards so far; -1 for a plain module.
        first: qualified name of the first parameter or buffer that differs, parameters before buffers; None if equal.
        groups: for `first`, groups of ranks with equal values.
        differing: the names of all that differ.
        pending: buffers that differ now, but are broadcast from rank 0 before the next forward.
        tensors: how many tensors were compared.
        bytes: how many bytes each rank hashed.
        seconds: how long it took on this rank.
    """

    ok: bool
    step: int
    first: str | None
    groups: tuple[tuple[int, ...], ...]
    differing: tuple[str, ...]
    pending: tuple[str, ...]
    tensors: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        cost = f"{self.tensors} tensors, {size(self.bytes)}, {ms(1e3 * self.seconds)}"
        differ = f"{counted(len(self.pending), 'buffer')} differ{'s' if len(self.pending) == 1 else ''}"
        later = f" ({differ} until the next forward broadcasts rank 0's.)" if self.pending else ""
        if self.ok:
            return f"All ranks hold the same parameters and buffers ({cost}).{later}"
        held = [(", ".join(map(str, ranks)), "s" if len(ranks) > 1 else "") for ranks in self.groups]
        holders = " | ".join(f"rank{s} {ranks}" for ranks, s in held)
        more = f"; {len(self.differing)} differ in total: {names(self.differing)}" if len(self.differing) > 1 else ""
        after = f" after step {self.step - 1}" if self.step > 0 else ""
        return (
            f"The replicas have diverged{after}: '{self.first}' is not the same on all ranks. Ranks with equal "
            f"values: {holders}{more} ({cost}).{later} Look for updates that differ between ranks: an optimizer step "
            "that some ranks skip, a different learning rate or random number, parameters that are not averaged "
            "(no_sync, find_unused_parameters), a comm hook with different results (check_hook)."
        )

    __repr__ = __str__
