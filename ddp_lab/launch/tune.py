"""`ddp-lab tune`: any training script under torch's agent, whose models are tuned while it trains.

The agent's process has a `Wire`, as a notebook does, to which the ranks connect; one of its threads tunes the training
model, as `Cluster.tune` does beside a cell. The program is not involved, and continues with the winner.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from ..command_line import Parser, count, file_to_write, seconds, write_json
from ..control.training import TrainingControl
from ..control.tuning import tune_live
from ..control.wire import Wire
from ..errors import ClusterError, DdpLabError
from ..simulation.settings import Tuned
from ..timeline.timeline import Timeline
from . import agent
from .endpoint_file import write_endpoint

__all__ = ["Job", "main"]

_LOOK_SECONDS = 0.1
_ENDING_SECONDS = 5.0


class Job:
    """The ranks of a program that torch's agent runs.

    Args:
        folder: for the sockets; only this user may open it.

    Attributes:
        wire: the channel to the ranks.
        invitation: file with which a worker connects to it.
    """

    run = None  # its ranks run a program, not cells

    def __init__(self, folder: Path) -> None:
        self.timeline = Timeline()
        self.wire = Wire(str(folder))
        self.wire.on_batch(self.timeline.extend)
        self.wire.on_description(self.timeline.describe)
        self.invitation = write_endpoint(self.wire, folder)

    def busy_ranks(self) -> set[int]:
        """Empty: the ranks run a program, not cells."""
        return set()


class _Tuner:
    """Tunes the job's model on a thread as soon as it trains.

    Args:
        job: the job whose model is tuned.
        given: the command's options.
    """

    def __init__(self, job: Job, given: argparse.Namespace) -> None:
        self.found: Tuned | None = None
        self.error: Exception | None = None
        self.stopped_the_job = False
        self._job, self._given = job, given
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddp_lab-tune", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """The program has ended."""
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            while not self._job.timeline.reducers():  # imports, data, the model: as long as it takes
                if self._ended.wait(_LOOK_SECONDS):
                    return
            given = self._given
            self.found = tune_live(
                TrainingControl(self._job),
                steps=given.steps,
                lossy=given.lossy,
                seconds=given.seconds,
                tell=_tell,
                first_seconds=3600.0,
            )
        except ClusterError as error:
            if not self._ended.wait(_ENDING_SECONDS):  # otherwise the ranks don't answer because the program has ended
                self.error = error
            return
        except Exception as error:  # noqa: BLE001 - a thread's top: reported at the end
            self.error = error
            return
        if not self._ended.is_set():
            _tell(self.found.verdict)
            if given.stop:
                self.stopped_the_job = True
                os.kill(os.getpid(), signal.SIGTERM)  # torch's agent ends the ranks


def _tell(line: str) -> None:
    print(f"ddp-lab tune: {line}", file=sys.stderr, flush=True)


def parser() -> Parser:
    """torchrun's parser, and our options."""
    made, ours = agent.torchrun_parser(
        "ddp-lab tune",
        "Runs a training script as torchrun does, with ddp_lab's DistributedDataParallel. While it trains, searches "
        "for bucket size limits with which its steps are shorter, applies them to the model, and prints the "
        "constructor's arguments. Applies nothing that is not clearly faster. The exit code is torchrun's; with --stop "
        "it is 0.",
        (
            "ddp-lab tune --standalone --nproc-per-node 2 train.py --epochs 3",
            "ddp-lab tune --stop --json tuned.json --standalone --nproc-per-node 2 train.py",
        ),
    )
    ours.add_argument("--lossy", action="store_true", help="also try comm hooks that round gradients to 16 bits")
    ours.add_argument("--seconds", type=seconds, default=300.0, metavar="S", help="time limit of tuning (%(default)s)")
    ours.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="training steps per block (default: about 0.3 s of them)",
    )
    ours.add_argument("--stop", action="store_true", help="end the program when the result is known")
    ours.add_argument("--json", type=file_to_write, metavar="FILE", help="write the result to FILE")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and tunes the program; returns its exit code, 0 if it was stopped with a result.

    Raises:
        DdpLabError: it runs on several hosts, or can't be started.
    """
    made = parser()
    given = made.parse_args(argv)
    agent.check_torchruns(made, given)
    if str(given.nnodes) not in ("1", "1:1"):
        raise DdpLabError(f"--nnodes {given.nnodes}: only programs on one host can be tuned")
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as name:
        job = Job(Path(name))
        with job.wire:
            agent.wrap_program_in_worker(given, "--control", str(job.invitation))
            tuner = _Tuner(job, given)
            try:
                code = agent.run_agent(given)
            finally:
                tuner.end()
    _say(tuner)
    if given.json is not None and tuner.found is not None:
        try:
            write_json(given.json, _as_dict(tuner.found))
        except DdpLabError as error:  # the program itself ended without error
            _tell(str(error))
    return 0 if tuner.stopped_the_job else code


def _say(tuner: _Tuner) -> None:
    if tuner.error is not None:
        _tell(f"not tuned: {tuner.error}")
    elif tuner.found is None:
        _tell("not tuned: the program ended before a DistributedDataParallel model had trained some steps.")
    else:
        print(tuner.found)


def _as_dict(found: Tuned) -> dict[str, object]:
    return {
        "verdict": found.verdict,
        "arguments": found.arguments,
        "applied": found.applied,
        "gain": None if found.gain is None else vars(found.gain),
        "steps": found.steps,
        "seconds": found.seconds,
        "tried": [
            {"setting": str(one.setting), "caps_mb": one.setting.caps_mb, "hook": one.setting.hook}
            | {"predicted_ms": one.predicted_ms, "measured_ms": one.measured_ms, "turns": one.rounds}
            for one in found.tried
        ],
    }
