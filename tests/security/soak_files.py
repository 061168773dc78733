"""Reads files that are damaged or made up, one after the other, in one process with little memory; prints figures.

``python -m tests.security.soak_files COUNT SEED``. Half of the files are journals, half saved timelines. Of each half
one part is a valid file some of whose bytes are others (*damaged*), one part is made up: checksums hold, contents do
not. Each is read by all who read files, and what can be read is reported. When all libraries are loaded, the process
lets its address space grow by 1 GiB, no more, and each file has 20 s of the processor, and ten times that to wait.
"""

from __future__ import annotations

import collections
import copy
import faulthandler
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ddp_lab import follow
from ddp_lab.protocol import events, journal
from ddp_lab.timeline.comparison import compare
from ddp_lab.timeline.timeline import Timeline, read_run
from tests import journals
from tests.security import hostile
from tests.training_events import Training

GROWTH, SECONDS, WAITING_SECONDS = 1 << 30, 20, 200
VALUES = [None, True, -1, 0, 2**31 - 1, 2**31, 2**53, 2**63, -(2**63), 1e308, float("nan"), "", "<b>", "\x1b]0;x\x07"]
VALUES += ["\ud800", [], {}, [[1]], {"rank": []}, [0] * 1000, "x" * 100_000]


class _TooLong(BaseException):
    """A file took more than its time."""


def _alarm(*_: object) -> None:
    raise _TooLong


def _messages(ranks: int = 2, steps: int = 6) -> list[list[list[bytes]]]:
    """The messages of each rank's journal."""
    training = Training(ranks, 3, forward_ms=1.0)
    described = journal.json_frames("describe", descriptions=[training.assignment(), *hostile.WATCHED])
    made = [[journals.opening(rank=rank, world_size=ranks, session=rank + 1), described] for rank in range(ranks)]
    for step in range(steps):
        for rank, of_rank in enumerate(training.step(step, 10**12 + step * 10**7)):
            batch = events.Batch(rank, rank + 1, int(of_rank["sequence"][0]), 0, of_rank)
            made[rank].append(journals.batch(batch))
    return [[*one, journal.json_frames("end", how="finished")] for one in made]


# ---- making files ---------------------------------------------------------------------------------------


def _damaged(data: bytes, dice: random.Random) -> bytes:
    """Some bytes are others, missing, twice there, or nought."""
    made = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        at, size = dice.randrange(len(made)), dice.choice([1, 4, 20, 200, 4096])
        what = dice.choice(["bit", "bytes", "nought", "missing", "twice", "cut", "moved"])
        if what == "bit":
            made[at] ^= 1 << dice.randrange(8)
        elif what == "bytes":
            made[at : at + size] = dice.randbytes(len(made[at : at + size]))
        elif what == "nought":
            made[at : at + size] = bytes(len(made[at : at + size]))
        elif what == "missing":
            del made[at : at + size]
        elif what == "twice":
            made[at:at] = made[at : at + size]
        elif what == "cut":
            del made[at:]
        else:
            part = made[at : at + size]
            del made[at : at + size]
            there = dice.randrange(len(made) + 1)
            made[there:there] = part
        if len(made) < 2:
            break
    return bytes(made)


def _other_json(value: Any, dice: random.Random) -> Any:
    """A JSON value in which some things are missing or others."""
    made = copy.deepcopy(value)
    for _ in range(dice.choice([1, 1, 2, 4])):
        places = list(hostile.places(made))
        if not places:
            return dice.choice(VALUES)
        *way, last = dice.choice(places)
        inside = made
        for key in way:
            inside = inside[key]
        if dice.random() < 0.75:
            inside[last] = copy.deepcopy(dice.choice(VALUES))
        else:
            del inside[last]
    return made


def _other_events(made: np.ndarray, dice: random.Random) -> np.ndarray:
    """Events some of whose numbers are others."""
    made = made.copy()
    for _ in range(dice.choice([1, 2, 8])):
        field = dice.choice(events.DTYPE.names)
        info = np.iinfo(events.DTYPE[field])
        numbers = [info.min, info.max, 0, 1, info.max // 2, dice.randint(int(info.min), int(info.max))]
        made[field][dice.randrange(len(made))] = dice.choice(numbers)
    return made


def _made_up_journal(messages: list[list[bytes]], dice: random.Random) -> bytes:
    """Messages whose checksums hold, with other contents, in another order, or too many."""
    made = [list(frames) for frames in messages]
    for _ in range(dice.choice([1, 1, 2, 3])):
        at = dice.randrange(len(made))
        what = dice.choice(["contents", "contents", "contents", "frames", "order", "twice", "missing", "header"])
        if what == "contents" and len(made[at]) == 2 and made[at][0] == journal.JSON_FRAME:
            made[at] = [journal.JSON_FRAME, json.dumps(_other_json(json.loads(made[at][1]), dice)).encode()]
        elif (
            what == "contents"
            and len(made[at]) == 2
            and len(made[at][1]) % events.DTYPE.itemsize == 0 < len(made[at][1])
        ):
            frame = np.frombuffer(made[at][1], events.DTYPE)
            made[at] = [made[at][0], _other_events(frame, dice).tobytes()]
        elif what == "frames":
            made[at] = dice.choice([[], [b""], made[at] * 3, [dice.randbytes(40), b""], made[at][:1]])
        elif what == "order":
            made.insert(dice.randrange(len(made)), made.pop(at))
        elif what == "twice":
            made.insert(at, made[at])
        elif what == "missing" and len(made) > 1:
            del made[at]
        elif what == "header" and len(made[at]) == 2 and len(made[at][0]) > 4:
            made[at] = [_damaged(made[at][0], dice), made[at][1]]
    numbers = list(range(len(made)))
    if dice.random() < 0.3:
        numbers[dice.randrange(len(made))] = dice.choice([0, 7, 2**32 - 1])
    return journal.MAGIC + b"".join(journal.pack(one, number) for one, number in zip(made, numbers, strict=True))


def _many_models() -> bytes:
    """As many models as events: what takes time for each pair of them takes too long."""
    made = np.zeros(4_000, events.DTYPE)
    made["sequence"] = made["reducer"] = np.arange(len(made))
    made["host_ns"], made["kind"] = 10**12 + made["sequence"] * 1_000, events.Kind.BACKWARD_BEGIN
    made["bucket"] = made["parameter"] = -1
    return journals.written([journals.opening(), journals.batch(events.Batch(0, 1, 0, 0, made))])


def _made_up_timeline(arrays: dict[str, np.ndarray], dice: random.Random) -> bytes:
    """Arrays of a saved timeline, one or two of which are others."""
    made = dict(arrays)
    for _ in range(dice.choice([1, 1, 2])):
        name = dice.choice(sorted(made))
        what = dice.choice(["contents", "contents", "contents", "shape", "missing", "type"])
        if what == "contents" and name == "about":
            try:
                made[name] = np.array(json.dumps(_other_json(json.loads(str(made[name])), dice)))
            except ValueError:
                made[name] = np.array("{")
        elif what == "contents" and name == "events" and made[name].dtype == events.DTYPE and made[name].size:
            made[name] = _other_events(made[name].ravel(), dice)
        elif what == "contents" and made[name].dtype == np.int64 and made[name].size:
            made[name] = made[name].copy()
            made[name][dice.randrange(len(made[name]))] = dice.choice([-1, 2**31, 2**62, 0])
        elif what == "shape":
            made[name] = made[name].ravel()[: dice.randrange(3)]
        elif what == "missing" and len(made) > 1:
            del made[name]
        elif what == "type":
            made[name] = np.zeros(dice.randrange(4), dice.choice(["f8", "i4", "U3", "u1"]))
    body = io.BytesIO()
    np.savez_compressed(body, **made)
    return body.getvalue()


# ---- reading and judging --------------------------------------------------------------------------------


def _held(timeline: Timeline) -> dict[tuple[int, int], bytes]:
    """(rank, sequence number) -> an event's bytes."""
    return {(rank, int(event["sequence"])): event.tobytes() for rank, chunk in timeline.since(0)[0] for event in chunk}


def _read(path: Path, folder: Path) -> tuple[Timeline, tuple[str, ...]]:
    """Reads a file in every way, and reports what it holds.

    Raises:
        ValueError: all of them refuse it.
    """
    said: list[str] = []

    def tried(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ValueError as error:
            said.append(str(error))
            return None

    run = tried(lambda: read_run([path], partial=True))
    if path.suffix == journal.SUFFIX:
        job = tried(lambda: follow(str(path.parent)))
        if job is not None:
            job.close()
            tried(job.timeline.summary)
    if run is None:
        if not all(path.name in one for one in said):
            raise AssertionError(f"a refusal that does not name the file: {said}")
        raise ValueError(said[0])
    timeline: Timeline = run.timeline
    hostile.answers(timeline, folder)
    timeline.to_perfetto(folder / "trace.json")
    tried(lambda: compare(path, path))
    return timeline, tuple(one for one in run.notices if not one.startswith("there is no file of"))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(count: int, seed: int) -> dict[str, Any]:  # noqa: C901 - outcomes of one attempt
    """Makes and reads the files; returns what was seen."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _alarm)
    signal.signal(signal.SIGPROF, _alarm)
    seen: collections.Counter[str] = collections.Counter()
    worst: list[str] = []
    slowest = (0.0, "")
    with tempfile.TemporaryDirectory() as name:
        folder, inside = Path(name), Path(name, "files")
        inside.mkdir()
        messages = _messages()
        for rank, of_rank in enumerate(messages):
            (inside / f"rank{rank}.journal").write_bytes(journals.written(of_rank))
        whole = Timeline.load(inside)
        saved = whole.save(folder / "whole.npz")
        with np.load(saved) as file:
            arrays = dict(file)
        right = _held(whole)
        _read(saved, folder)  # what is loaded late is loaded now
        for path in inside.iterdir():
            path.unlink()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + GROWTH
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = _peak()
        for number in range(count):
            dice = random.Random(seed * 1_000_003 + number)
            kind, how = ("journal", "npz")[number % 2], ("damaged", "made up")[number // 2 % 2]
            rank = dice.randrange(2)
            if number % 500 == 2:
                data = _many_models()
            elif how == "damaged":
                data = _damaged(journals.written(messages[rank]) if kind == "journal" else saved.read_bytes(), dice)
            else:
                data = _made_up_journal(messages[rank], dice) if kind == "journal" else _made_up_timeline(arrays, dice)
            path = inside / f"file{number}.{kind}"
            path.write_bytes(data)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(WAITING_SECONDS)
            try:
                timeline, notices = _read(path, folder)
                outcome = "read"
            except ValueError:
                outcome = "refused"
            except _TooLong:
                outcome = "timed out"
            except BaseException:  # noqa: BLE001 - what a reader must not raise is what this looks for
                outcome = "crashed"
                worst.append(f"file {number}: {traceback.format_exc(limit=-4)}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.alarm(0)
            slowest = max(slowest, (time.process_time() - began, path.name))
            if outcome == "read" and how == "damaged":
                held = _held(timeline)
                part = {key: one for key, one in right.items() if kind == "npz" or key[0] == rank}
                if any(part.get(key) != one for key, one in held.items()):
                    outcome = "other numbers"
                elif held != part and not notices:
                    outcome = "less, and no word"
                elif notices:
                    outcome = "read with a notice"
                if outcome in ("other numbers", "less, and no word"):
                    worst.append(f"file {number}: {outcome}: {notices}")
            seen[f"{kind}, {how}: {outcome}"] += 1
            path.unlink()
        growth = _peak() - before
    return {
        "files": count,
        "seed": seed,
        "seen": dict(sorted(seen.items())),
        "peak growth MiB": round(growth / 2**20, 1),
        "slowest CPU s": round(slowest[0], 2),
        "slowest file": slowest[1],
        "worst": worst[:10],
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2])), indent=2))
