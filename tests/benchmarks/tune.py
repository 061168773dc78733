"""Measures what tuning saves compared with torch's default buckets, and how close it is to the best of a grid.

Real Gloo ranks train a model endlessly, over a link shaped to `--mbit` megabits per second (needs root; without it over
loopback), and are tuned meanwhile. Then torch's defaults, the tuned setting and every size limit of the grid alternate
for `--rounds` rounds: the saving is the median over the rounds of ratios within a round. [Note: the second look]
explains how the choice is compared with the best of the grid.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_lab.bench.measuring import command, fresh_ranks
from ddp_lab.bench.measuring.command import option
from ddp_lab.bench.measuring.workloads import WORKLOADS, training_step
from ddp_lab.command_line import count, positive, seconds
from ddp_lab.control.ab_trials import LiveTrialRunner
from ddp_lab.control.training import TrainingControl
from ddp_lab.control.tuning import tune_live
from ddp_lab.errors import ClusterError, DdpLabError
from ddp_lab.launch.tune import Job
from ddp_lab.simulation.settings import Setting
from notebooks.paper.shaped_link import shaped
from tests.benchmarks.second_look import NOT_NEEDED, second_look, words

_GRID = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_DEFAULT = Setting((1.0, 25.0))
_START_SECONDS = 120.0
_END_SECONDS = 60.0
_END_MB = 12_345.0  # a bucket cap that nobody uses: all ranks get it before the same step, and stop there


def _train(model: str, endpoint: Mapping[str, str]) -> int:
    """Trains on each rank until it is given the buckets that mean the end; returns how many steps.

    Args:
        model: of `WORKLOADS`.
        endpoint: of the wire over which it is changed and seen.
    """
    from ddp_lab import DistributedDataParallel, recording
    from ddp_lab.engine import model_control
    from ddp_lab.engine.telemetry import Telemetry

    recording.enable()
    telemetry = Telemetry(endpoint, dist.get_rank(), dist.get_world_size())
    model_control.install(telemetry)
    telemetry.start()
    torch.manual_seed(0)
    module, batch = WORKLOADS[model]()
    ddp = DistributedDataParallel(module)
    step, steps = training_step(ddp, batch), 0
    while ddp.bucket_bytes_cap != int(_END_MB * 2**20):
        step()
        steps += 1
    telemetry.stop()
    return steps


def measure(
    model: str = "transformer",
    ranks: int = 2,
    mbit: float | None = None,
    caps: Sequence[float] = _GRID,
    *,
    rounds: int = 7,
    steps: int = 6,
    seconds: float = 300.0,
) -> dict[str, Any]:
    """Trains, tunes and compares; see the module.

    Args:
        model: of `WORKLOADS`.
        ranks: how many.
        mbit: of each rank's link; None: loopback.
        caps: the grid; each cap alone, and with a first bucket of 1 MiB.
        rounds: turns of each setting after tuning.
        steps: of a turn.
        seconds: that tuning may take.

    Returns:
        ``default``, ``chosen`` and ``best`` (settings as text), ``gain`` of the chosen one over the default (fraction
        of the step) and ``again``: its `second_look` beside the best one; ``steps_ms`` (setting -> medians of its
        turns), ``tuned`` (words), and what was asked for.

    Raises:
        DdpLabError: the link can't be shaped, or the ranks failed.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as folder:
        job = Job(Path(folder))
        try:
            with shaped(ranks, mbit) as prepare:
                training = _begun(
                    lambda: fresh_ranks.run(_train, model, job.wire.endpoint(), ranks=ranks, prepare=prepare)
                )
                try:
                    found = _tuned_and_compared(job, training, caps, rounds, steps, seconds)
                finally:
                    _end(training, job)
        finally:
            job.wire.close()
    return found | {"model": model, "ranks": ranks, "mbit": mbit, "rounds": rounds, "steps": steps}


def _begun(train: Callable[[], Any]) -> Future[Any]:
    """Has ranks train on a thread that nobody needs to wait for."""
    training: Future[Any] = Future()

    def run() -> None:
        try:
            training.set_result(train())
        except BaseException as error:  # noqa: BLE001 - a thread's top: raised by who waits for it
            training.set_exception(error)

    threading.Thread(target=run, name="ddp_lab-bench", daemon=True).start()
    return training


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check(training: Future[Any]) -> None:
    """Raises what ended the ranks."""
    error = training.exception() if training.done() else None
    if error is not None:
        raise DdpLabError(f"the ranks failed: {error}") from error


def _end(training: Future[Any], job: Job) -> None:
    """Has the ranks stop, and waits for them."""
    if not training.done() and job.timeline.reducers():
        try:
            TrainingControl(job).reconfigure(bucket_cap_mb=_END_MB)
        except ClusterError:  # they end as soon as they have it, maybe before they say so
            if not wait([training], _END_SECONDS).done:
                raise
    wait([training])


def _tuned_and_compared(
    job: Job,
    training: Future[Any],
    caps: Sequence[float],
    rounds: int,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    deadline = time.monotonic() + _START_SECONDS
    while not job.timeline.reducers():
        _check(training)
        if time.monotonic() > deadline:
            raise DdpLabError(f"no model is training after {_START_SECONDS:.0f} s")
        time.sleep(0.05)
    control = TrainingControl(job)
    tuned = tune_live(control, steps=steps, seconds=seconds, tell=_tell)
    _tell(tuned.verdict)
    turns = LiveTrialRunner(control, job.timeline.reducers()[-1].reducer, steps)
    chosen = tuned.best or _DEFAULT
    grid = [Setting((cap,)) for cap in caps] + [Setting((1.0, cap)) for cap in caps if cap > 1]
    settings = list(dict.fromkeys([_DEFAULT, chosen, *grid]))
    times: dict[Setting, list[float]] = {setting: [] for setting in settings}

    def take(setting: Setting) -> float:
        _check(training)
        return float(np.median(turns.take(setting)))

    for number in range(rounds):
        first = number * max(1, len(settings) // rounds) % len(settings)
        for setting in settings[first:] + settings[:first]:
            times[setting].append(take(setting))
        _tell(f"grid: round {number + 1} of {rounds}")
    # Ratios within rounds, so that a machine that drifts does no harm.
    table = {setting: np.array(values) for setting, values in times.items()}
    relative = {setting: float(np.median(values / table[chosen])) for setting, values in table.items()}
    best = min(relative, key=lambda setting: relative[setting])
    pairs: dict[Setting, list[float]] = {chosen: [], best: []}
    for number in range(2 * rounds if best != chosen else 0):
        for setting in list(pairs)[:: 1 if number % 2 else -1]:
            pairs[setting].append(take(setting))
    return {
        "tuned": str(tuned),
        "tuning_seconds": tuned.seconds,
        "default": str(_DEFAULT),
        "chosen": str(chosen),
        "best": str(best),
        "gain": 1 - 1 / relative[_DEFAULT],
        "again": second_look(pairs[chosen], pairs[best]) if best != chosen else NOT_NEEDED,
        "steps_ms": {str(setting): values for setting, values in times.items()},
    }


def table(found: dict[str, Any]) -> str:
    link = "over loopback" if found["mbit"] is None else f"over links shaped to {found['mbit']:g} Mbit/s"
    lines = [f"{found['model']} on {found['ranks']} Gloo ranks {link}", found["tuned"], ""]
    lines.append(f"{found['rounds']} rounds of {found['steps']} steps, interleaved:")
    for name, values in sorted(found["steps_ms"].items(), key=lambda item: float(np.median(item[1]))):
        marks = ", ".join(word for word in ("default", "chosen", "best") if found[word] == name)
        lines.append(f"{name:28} {np.median(values):9.2f} ms  {marks}".rstrip())
    lines.append(f"saving compared with torch's defaults: {100 * found['gain']:.1f} % of the step")
    lines.append(f"compared with the best of the grid: {words(found['again'])}")
    return "\n".join(lines)


OPTIONS = (
    option("--model", choices=list(WORKLOADS)),
    command.RANKS,
    option("--mbit", type=positive, help="shape the link to this many megabits per second (needs root)"),
    option("--caps", nargs="+", type=positive, help="the grid of size limits, in MiB"),
    option("--rounds", type=count, help="turns of each setting of the grid"),
    option("--steps", type=count, help="steps per turn"),
    option("--seconds", type=seconds, help="longest time for tuning"),
)
