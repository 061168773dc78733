"""Which rank failed first, which ones only followed, and how to report it."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...diagnosis.rules import BUFFERS_ARE_BROADCAST, IN_FORWARD, Diagnosis
from ...documentation import more
from ...errors import CellError, RankFailure
from ...formatting import duration, enumeration, label_of
from ...protocol.messages import CellReport, RequestFailure

INTERRUPTED = "KeyboardInterrupt"
LOST = "RankLost"
NOT_RUN = "NotRun"
UNKNOWN = "OutcomeUnknown"
TIMEOUT = "Timeout"
_KNOWN = (  # words of the error, words of a rank's traceback, what to do
    ("default process group twice", "", "The cluster has made the default group before the cell: remove this line."),
    (" broadcast ", IN_FORWARD, BUFFERS_ARE_BROADCAST),
)
_LONGEST_MESSAGE = 300
_ELSEWHERE = "Original Traceback (most recent call last):"
_REPLACED = "The next cell, or `%cluster rejoin`, starts a new process for it; the other ranks keep their variables."
_ALL_REPLACED = "The next cell, or `%cluster rejoin`, starts new processes for them."
# Words in messages on ranks for which no cell starts a new process: they have one, or nothing is left to start it.
_GIVEN_UP = (
    "%cluster restart",
    "when the cluster was",
    "to be replaced",
    "without this process",
    "taken over by process",
)
_WITH_HOST = "lost with host"  # see `Server` in `ddp_lab/cluster/processes/remote_launchers.py`
_HELP = "`%cluster interrupt` tries again, `%cluster rejoin --replace {}` restarts the process"

# What a collective of torch raises when its peers failed or were unblocked (Gloo, NCCL, TCPStore).
_COMMUNICATION = re.compile(
    r"gloo|connection (?:closed|reset|refused)|broken pipe|socket closed|nccl|process ?group|\bstore\b|"
    r"aborted|unblocked|timed out waiting",
    re.IGNORECASE,
)
_SOURCE_PLACE = re.compile(r"^\[[^\]\s]+:\d+\]\s*")
_ADDRESS = re.compile(r" \[[\d.:a-f]+\]:\d+")
_COMMUNICATION_NAMES = {"DistBackendError", "DistNetworkError", "DistStoreError"}


def marked(text: str) -> str:
    """Text in white on dark red, which is readable on any page: no single colour is on both light and dark ones."""
    return f"\x1b[1;38;5;231;48;5;124m{text}\x1b[0m"


def failure_of(rank: int, report: CellReport) -> RankFailure:
    """The failure that rank `rank` reported."""
    whole, short = "\n".join(report.traceback), "\n".join(report.brief)
    return RankFailure(
        rank=rank,
        name=report.name,
        message=report.message,
        traceback=whole,
        time_ns=report.time_ns,
        secondary=report.consequence,
        waited_in=report.waited_in,
        broke_backward=report.broke_backward,
        short_traceback="" if short == whole else short,
    )


def lost(rank: int, why: str, last_words: str = "") -> RankFailure:
    """The failure of a rank whose process exited: the cause of whatever its peers report.

    Args:
        rank: the rank.
        why: how it ended.
        last_words: the last lines that it wrote outside cells.
    """
    return RankFailure(rank, LOST, why, last_words, 0, False)


def unknown(rank: int, why: str) -> RankFailure:
    """The failure of a running rank whose report on the cell was lost."""
    return RankFailure(rank, UNKNOWN, why, "", time.monotonic_ns(), secondary=False)


def outside(rank: int, error: RequestFailure) -> RankFailure:
    """The failure of a rank outside the cell's own code."""
    return RankFailure(rank, error.name, error.message, error.traceback, time.monotonic_ns(), secondary=False)


def replaced_text(replaced: Mapping[int, str], world_size: int) -> str:
    """The text on ranks that have new processes; `replaced` maps rank to how the former process ended."""
    whole = [rank for rank in range(world_size) if rank not in replaced]
    why = ", ".join(dict.fromkeys(replaced.values()))
    text = f"a new process (the former one {why}); its variables are lost"
    if not whole:
        return text
    return f"{text}; `ddp_lab.copy_state_from({whole[0]})`, in a cell on all ranks, copies those of rank {whole[0]}"


def timed_out(rank: int, seconds: float, time_ns: int) -> RankFailure:
    """The failure of a rank that did not end in time and does not answer the interrupt."""
    return RankFailure(rank, TIMEOUT, f"did not end within {seconds:g} s", "", time_ns, False)


def in_order(failures: Sequence[RankFailure]) -> dict[int, RankFailure]:
    """Failures by rank: causes first, each group by time; later communication errors become consequences."""
    by_time = sorted(failures, key=lambda each: (each.secondary, each.time_ns))
    marked = by_time[:1] + [
        each if each.secondary or not is_communication(each) else replace(each, secondary=True) for each in by_time[1:]
    ]
    if marked and is_communication(marked[0]):
        # The clocks of two ranks that fail within a microsecond can't order them; the kind of failure can.
        causes = [each for each in marked[1:] if not is_communication(each) and not each.secondary]
        if causes and not marked[0].secondary:
            marked = [*causes, replace(marked[0], secondary=True), *(m for m in marked[1:] if m not in causes)]
    marked.sort(key=lambda each: each.secondary)
    return {each.rank: each for each in marked}


def cell_error(
    failures: Mapping[int, RankFailure], label: str, run: str = "", cause: Diagnosis | None = None
) -> CellError:
    """The error of a cell with these failures.

    Args:
        failures: rank -> failure, the first cause first (see `in_order`).
        label: the cell's name.
        run: the expression that holds the failures; "": the last error that was raised.
        cause: what the ranks recorded last, compared; None if that tells nothing.
    """
    first = _culprit(failures)
    assert first is not None, "a cell without a failure has no error"
    same = [each for each in failures.values() if _same(each, first)]
    who = label_of(each.rank for each in same)
    if first.name == LOST:
        message = _lost_words(who, first)
        lines = [f"{marked(message)} during cell {label}", *_because(cause)]
        if first.traceback and (cause is None or cause.kind == "lost"):
            lines += [f"the last lines of the log of {label_of([first.rank])}:", *first.traceback.splitlines()]
        lines += _remedy(message, len(same))
    elif first.name == UNKNOWN:
        message = f"{who} {_headline(first)}"
        lines = [f"{marked(who)} {_headline(first)} (cell {label})"]
    elif first.name == NOT_RUN:
        message = f"{who} did not run the cell: {first.message}"
        lines = [f"{marked(f'{who} did not run')} cell {label}: {first.message}"]
    elif first.name == INTERRUPTED:
        message = f"{label_of(failures)} {_was(failures)} interrupted"
        lines = [f"{marked(message)} in cell {label}", *_where(failures, ())]
        return CellError(message, failures, "\n".join(lines))
    else:
        message = f"{who} failed: {_headline(first)}"
        lines = [f"{marked(f'{who} failed')} in cell {label}", *_because(cause)]
        lines += on_any_page(first.short_traceback or first.traceback).splitlines() or [_headline(first)]
        if first.short_traceback:
            found = f"print({run or 'sys.last_value'}.failures[{first.rank}].traceback)"
            lines.append(f"all frames: `{found if run else f'import sys; {found}'}`")
        traces = "\n".join(one.traceback for one in failures.values())
        lines += [f"→ {remedy}" for words, trace, remedy in _KNOWN if words in first.message and trace in traces]
    lines += _folded([each for each in failures.values() if each not in same], first)
    lines += _discarded(failures)
    if first.name == LOST:
        lines.append(more("host-lost") if _WITH_HOST in first.message else more("rank-killed"))
    return CellError(message, failures, "\n".join(lines))


def _because(cause: Diagnosis | None) -> list[str]:
    return [] if cause is None else cause.brief.splitlines()


def timeout_error(failures: Mapping[int, RankFailure], ranks: Sequence[int], label: str, seconds: float) -> CellError:
    """The error of a cell whose `ranks` had not ended after `seconds` and were interrupted."""
    message = f"{label_of(ranks)} did not end within {seconds:g} s"
    lines = [f"{marked(message)} in cell {label} and {_was(ranks)} interrupted"]
    silent = [rank for rank in ranks if rank in failures and failures[rank].name == TIMEOUT]
    lines += [*_where(failures, silent), more("cell-timeout")]
    return CellError(message, failures, "\n".join(lines))


def end_of(failures: Mapping[int, RankFailure]) -> str:
    """The state of a cell that has ended: "done", "failed", "interrupted" or "not run"."""
    first = _culprit(failures)
    if first is None:
        return "done"
    return {INTERRUPTED: "interrupted", NOT_RUN: "not run"}.get(first.name, "failed")


def _culprit(failures: Mapping[int, RankFailure]) -> RankFailure | None:
    """The failure that a line about the cell names: the first that is not an interrupt, if there is one."""
    own = [each for each in failures.values() if not each.secondary]
    others = (each for each in own if each.name not in (INTERRUPTED, TIMEOUT))
    return next(others, next(iter(failures.values()), None))


def ending(state: str, failures: Mapping[int, RankFailure], seconds: float) -> str:
    """One line for a cell that has ended: how, and after how long.

    Args:
        state: "done", "failed", "interrupted" or "not run".
        failures: rank -> failure, the first cause first (see `in_order`).
        seconds: since it was sent.
    """
    took, first = duration(seconds), _culprit(failures)
    if state == "done":
        return f"✓ done in {took}"
    if state == "interrupted" or first is None:
        return f"■ interrupted after {took}"
    if state == "not run":
        return f"– not run: {first.message}"
    if first.name in (INTERRUPTED, TIMEOUT):
        return f"✗ interrupted by its time limit after {took}"
    who = label_of(each.rank for each in failures.values() if _same(each, first))
    if first.name == LOST:
        return f"✗ lost after {took}: {_lost_words(who, first)}"
    return f"✗ {who} failed after {took}: {_headline(first)}"


def announcement(failure: RankFailure, others: Sequence[int]) -> str:
    """One line for a cell that continues on other ranks after one failed."""
    verb = "continue" if len(others) > 1 else "continues"
    return f"✗ {_headline(failure)} ({label_of(others)} {verb}; interrupt the cell to stop)"


def waiting(label: str, ahead: Sequence[str]) -> str:
    """One line for a cell whose ranks still run earlier cells."""
    return f"{label} waits for {enumeration(ahead)} …"


def interrupt_report(
    failures: Mapping[int, RankFailure], silent: Sequence[int], label: str, ahead: Sequence[str] = ()
) -> list[str]:
    """What a notebook shows for a cell that the user interrupted: where each rank was.

    Args:
        failures: rank -> failure.
        silent: ranks that have not ended it.
        label: the cell's name.
        ahead: the cells it waited for, if no rank had begun it.
    """
    lines = [f"{marked('KeyboardInterrupt')}: cell {label} was interrupted"]
    if ahead:
        continue_ = "continue" if len(ahead) > 1 else "continues"
        lines[0] += f" before it began; {enumeration(ahead)} {continue_} (`%cluster interrupt` ends all cells)"
        return lines
    return lines + _where(failures, silent)


def _where(failures: Mapping[int, RankFailure], silent: Sequence[int]) -> list[str]:
    """Where interrupted ranks were, with the cell's own lines; ranks at the same place share an entry."""
    lines: list[str] = []
    places: dict[str, list[int]] = {}
    for rank in sorted(failures):
        failure = failures[rank]
        if failure.name == TIMEOUT:
            continue
        if failure.name == INTERRUPTED or failure.secondary or is_communication(failure):
            places.setdefault(_cell_lines_of(failure.traceback), []).append(rank)
        elif failure.name == LOST:
            lines.append(f"rank {rank} {_headline(failure)}.")
            lines += _remedy(failure.message)
        elif failure.name == UNKNOWN:
            lines.append(f"rank {rank} {_headline(failure)}.")
        else:
            lines.append(f"rank {rank} failed: {_headline(failure)}")
    if not failures and not silent:
        lines.append("it finished on every rank without an error")
    for place, ranks in places.items():
        lines.append(f"{label_of(ranks)} {_was(ranks)} " + ("here:" if place else "outside the cell's own lines"))
        lines += on_any_page(place).splitlines()
    lines += _discarded(failures)
    if silent:
        remedy = _HELP.format(",".join(map(str, silent)))
        lines.append(f"{marked(f'{label_of(silent)} did not respond to the interrupt')}: {remedy}")
    return lines


def _remedy(message: str, ranks: int = 1) -> list[str]:
    """One line on the new processes of failed ranks, if the next cell starts them."""
    if any(words in message for words in _GIVEN_UP):
        return []
    return [_REPLACED if ranks == 1 else _ALL_REPLACED]


def _discarded(failures: Mapping[int, RankFailure]) -> list[str]:
    """One line if a model's backward was in progress on some rank."""
    ranks = [failure.rank for failure in failures.values() if failure.broke_backward]
    if not ranks:
        return []
    return [
        f"a backward was in progress on {label_of(ranks)} and is discarded; in the next cell, `.grad` is None in its "
        "model on all ranks"
    ]


def _lost_words(who: str, failure: RankFailure) -> str:
    """What happened to failed ranks: ``"ranks 0–1 were killed by SIGKILL (signal 9)"``."""
    words = f"{who} {_headline(failure)}"
    return words.replace(f"{who} was ", f"{who} were ") if who.startswith("ranks") else words


def _was(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def is_communication(failure: RankFailure) -> bool:
    """Whether a collective failed: its peer is gone, or its group was shut down."""
    if failure.name in _COMMUNICATION_NAMES:
        return True
    return failure.name in ("RuntimeError", INTERRUPTED) and bool(_COMMUNICATION.search(failure.message))


def _same(one: RankFailure, other: RankFailure) -> bool:
    return (one.name, one.message, one.secondary) == (other.name, other.message, other.secondary)


def _headline(failure: RankFailure) -> str:
    """Name and first line of the message; of a collective's error, what happened without the C++ file name.

    An error that torch caught in a DataLoader worker or a replica's thread has its reason in the message's last line.
    """
    lines = failure.message.strip().splitlines()
    text = lines[0] if lines else ""
    if lines[1:2] == [_ELSEWHERE]:
        text = f"{text.rstrip('.')}: {lines[-1].removeprefix(f'{failure.name}: ')}"
    if is_communication(failure):
        text = _ADDRESS.sub("", _SOURCE_PLACE.sub("", text).split(". ")[0])
    if len(text) > _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + "…"
    if failure.name in (LOST, TIMEOUT, NOT_RUN, UNKNOWN):
        return text
    return f"{failure.name}: {text}" if text else failure.name


def _folded(failures: Sequence[RankFailure], first: RankFailure) -> list[str]:
    """One line for the ranks that waited and report the same, one for each other failure."""
    lines = []
    unblocked: dict[tuple[str, str], list[int]] = {}
    stopped: list[int] = []
    for failure in failures:
        if failure.name == INTERRUPTED:
            stopped.append(failure.rank)
        elif failure.secondary:
            unblocked.setdefault((failure.waited_in, _headline(failure)), []).append(failure.rank)
        else:
            later = (failure.time_ns - first.time_ns) / 1e6 if first.time_ns else 0.0
            when = f" {later:.0f} ms later" if later >= 1 else " too"
            lines.append(f"rank {failure.rank} failed{when}: {_headline(failure)}")
    for (waited_in, headline), ranks in unblocked.items():
        where = f" in {waited_in}" if waited_in else ""
        lines.append(f"{label_of(ranks)} waited for rank {first.rank}{where} and {_was(ranks)} unblocked ({headline})")
    if stopped:
        lines.append(f"{label_of(stopped)} {_was(stopped)} interrupted")
    return lines


_ANSI = re.compile(r"\x1b\[([0-9;]*)m")
_PALETTE = re.compile(r"[34]8;5;\d+|[34]8;2;\d+;\d+;\d+")


def on_any_page(rendered: str) -> str:
    """IPython's traceback without colours that are unreadable on JupyterLab's pink or dark red: bold replaces them.

    Black on yellow, which has its own background, stays.
    """
    return _ANSI.sub(lambda match: _weight(match[1]), rendered)


def _weight(codes: str) -> str:
    given = {int(code) for code in _PALETTE.sub("", codes).split(";") if code} if codes else {0}
    if {30, 43} <= given:
        return "\x1b[30;43m"
    if 0 in given or 49 in given:
        return "\x1b[0m"
    if given & {1, 31, 36}:  # names of errors, functions and places, keywords
        return "\x1b[1m"
    return "\x1b[22m" if 39 in given or 22 in given else ""


def _cell_lines_of(traceback: str) -> str:
    """The frames of a rendered traceback that are in a cell, the innermost cell's last; "" if there is none."""
    frames = [frame for frame in traceback.split("\n\n") if _ANSI.sub("", frame).lstrip("-\n ").find("Cell ") >= 0]
    kept = []
    for frame in frames:
        lines = frame.splitlines()
        first = next((n for n, line in enumerate(lines) if _ANSI.sub("", line).startswith("Cell ")), None)
        if first is not None:
            kept += lines[first:]
    return "\n".join(kept)
