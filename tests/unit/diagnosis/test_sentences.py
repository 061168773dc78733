"""What the doctor says of made-up ranks, word for word: as text, and as a notebook's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ddp_lab.diagnosis.collectives_in_flight import Flight, open_words
from ddp_lab.diagnosis.dumps import Dump, diagnose_dumps, flights_by_rank
from ddp_lab.diagnosis.mismatch import distances, with_places
from ddp_lab.diagnosis.report import HangReport
from ddp_lab.diagnosis.rules import HANGS as LESSON
from ddp_lab.diagnosis.rules import diagnose_ahead
from ddp_lab.diagnosis.snapshot import BucketStage, Call, Model, Place, RankSnapshot
from ddp_lab.diagnosis.stacks import snapshot_of_stack
from tests.unit.approved import approved
from tests.unit.diagnosis.test_flights import COPY, SUM, flights
from tests.unit.diagnosis.test_hangs import CALL, LINE, in_backward, waiting
from tests.unit.diagnosis.test_stacks import BACKWARD, C10D, FLYING, TORCH, user

NOW_NS = 1_000_000_000_000
LIBRARY = {"name": "all_reduce", "filename": "/v/lib/python3.11/site-packages/torch/distributed/x.py", "line": 7}
SCRIPT = Place("/home/me/train.py", 12, "main", "dist.all_reduce(t)", users=True)
AUTOGRAD = Place("torch/autograd/graph.py", 9, "_engine_run_backward", "run()", users=False)
SEND, RECEIVE = (Call(name, "point to point", "0", (0, 1), "", 0, 1, None) for name in ("send", "recv"))
STORE, MADE = "tcp://localhost:12355", {5: 1}
JOIN = replace(
    CALL, name="init_process_group", kind="group", what="", bytes=0, sequence=None, group="", joins=(0, 4), ranks=()
)
GROUP = replace(CALL, name="new_group", kind="group", what="", bytes=0, sequence=None, group="")
LACKING = Model(0, "Net", 5, True, False, "", (BucketStage("pending", 1, 2, ("a.weight", "a.bias")),))
PAUSED = replace(LACKING, paused="before bucket launch: bucket 1")
AGED = replace(flights(9), open=(Flight(9, SUM, 4.0, "bucket 1 of Net"), Flight(10, SUM, 0.01, "")), open_count=2)


def entry(
    group: str, number: int, *, name: str = "all_reduce", done: bool = True, line: int = 40, at_s: float = 900.0
) -> dict[str, Any]:
    """A collective of NCCL on one of the groups below."""
    made = {"record_id": int(at_s * 100) + number, "pg_id": int(group), "collective_seq_id": number, "p2p_seq_id": 0}
    made |= {"process_group": (group, f"mesh_{'dp' if group == '1' else 'tp'}"), "profiling_name": f"nccl:{name}"}
    made |= {"time_created_ns": int(at_s * 1e9), "input_sizes": [[4]], "input_dtypes": ["Float"], "is_p2p": False}
    frames = [LIBRARY, {"name": "train", "filename": "train.py", "line": line}]
    return made | {"state": "completed" if done else "started", "retired": done, "frames": frames}


def dump(rank: int, *entries: dict[str, Any]) -> Dump:
    """Of a rank of a job on groups "1" (ranks 0 and 1) and "2" (ranks 1 and 2)."""
    groups = {"1": "[0, 1]", "2": "[1, 2]"}
    config = {name: {"name": name, "desc": "", "ranks": ranks} for name, ranks in groups.items() if str(rank) in ranks}
    return Dump(rank, ({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)},), NOW_NS)


def script(one: RankSnapshot) -> RankSnapshot:
    return replace(one, runs="script", stack=(SCRIPT,), seconds=7.4)


def running(rank: int, *stack: Place, **fields: Any) -> RankSnapshot:
    return RankSnapshot(rank, "running", stack=stack or (replace(LINE, text="train()"),), **fields)


def with_model(one: RankSnapshot, forwards: Mapping[int, int] | None = None, *, in_flight: bool = True) -> RankSnapshot:
    """With a model in its sixth step, for which it made so many forwards."""
    model = replace(in_backward(0, 1).models[0], forwards=forwards or {}, in_flight=in_flight, finalizing=in_flight)
    return replace(one, models=(model,))


def rank(number: int, state: str, **fields: Any) -> RankSnapshot:
    return RankSnapshot(number, state, **fields)


BUSY = {
    "sleep": replace(LINE, text="time.sleep(9)"),
    "loader": Place("torch/utils/data/dataloader.py", 7, "f", "get()", users=False),
    "compiler": Place("torch/_inductor/scheduler.py", 7, "f", "set()", users=False),
    "import": Place("<frozen importlib._bootstrap>", 7, "_load", "", users=False),
    "thread": Place("lib/threading.py", 355, "wait", "wait()", users=False),
    "queue": Place("lib/queue.py", 171, "get", "wait()", users=False),
    "save": replace(LINE, text="torch.save(state, path)"),
    "else": replace(LINE, text="train()"),
}
ALL = replace(CALL, ranks=())
ROOTED = replace(CALL, name="broadcast", peer=0)
DEEP = tuple(replace(LINE, line=number, function=f"f{number}", text="x" * 150) for number in range(7))
HANGS: dict[str, Sequence[RankSnapshot]] = {
    "one failed": [waiting(0), rank(1, "lost", why="was killed by SIGKILL (signal 9)"), waiting(2)],
    "two failed": [waiting(0), *(rank(number, "lost", why="exited with code 1") for number in (1, 2))],
    "all failed": [rank(0, "lost", why="exited with code 1", runs="script")],
    "one is cut off": [script(waiting(0)), rank(1, "cut off", why="node 1 (b) does not answer", runs="script")],
    "two are cut off": [rank(number, "cut off", why="node 1 (b) does not answer") for number in (0, 1)],
    "one is stopped": [waiting(0), rank(1, "stopped", why="kill -CONT 7")],
    "two are stopped": [waiting(0), waiting(1), *(rank(one, "stopped", why=f"kill -CONT {one}") for one in (2, 3))],
    "one in the debugger": [waiting(0), running(1, debugged=True)],
    "all in the debugger": [running(0, debugged=True), running(1, debugged=True)],
    "one at a breakpoint": [waiting(0), running(1, models=(PAUSED,))],
    "two at a breakpoint": [running(0, models=(PAUSED,)), running(1, models=(PAUSED,))],
    "nothing runs": [rank(0, "idle"), rank(1, "idle")],
    "a script has ended": [rank(0, "idle", runs="script"), rank(1, "idle", runs="script")],
    "one is silent": [waiting(0), rank(1, "silent")],
    "two are silent": [waiting(0), rank(1, "silent", runs="script"), rank(2, "silent", runs="script")],
    "nobody waits": [running(0), running(1), running(2, *DEEP, seconds=61.0)],
    "both receive": [replace(waiting(one, replace(RECEIVE, peer=1 - one))) for one in (0, 1)],
    "both send": [waiting(one, replace(SEND, peer=1 - one)) for one in (0, 1)],
    "a message is received": [waiting(0, replace(RECEIVE, peer=1)), waiting(1, replace(SEND, peer=0))],
    "a message is missing": [waiting(0, RECEIVE), running(1)],
    "a recv is missing": [waiting(0, SEND), running(1)],
    "from any rank": [waiting(0, replace(RECEIVE, peer=None)), running(1)],
    "not sent to one": [waiting(0), rank(1, "idle", asked=False)],
    "not sent to two": [waiting(0, ALL), *(rank(one, "idle", asked=False) for one in (1, 2))],
    "one has ended": [waiting(0), rank(1, "idle")],
    "two have ended": [script(waiting(0, ALL)), *(rank(one, "idle", runs="script") for one in (1, 2))],
    "fewer batches": [in_backward(0, 1), rank(1, "unblocked")],
    "a gradient that never comes": [in_backward(0, 1), rank(1, "idle", models=(LACKING,))],
    "a gradient that one lacks": [in_backward(0, 1), running(1, models=(LACKING,))],
    "a backward that still lacks": [in_backward(0, 1), running(1, LINE, AUTOGRAD, models=(LACKING,))],
    "busy in a script": [script(waiting(0)), script(running(1))],
    **{f"busy: {name}": [waiting(0), waiting(2, ALL), running(1, where)] for name, where in BUSY.items()},
    "a compiler is imported": [waiting(0), running(1, BUSY["compiler"], BUSY["import"])],
    "a compiler imports": [waiting(0), running(1, BUSY["import"], BUSY["compiler"])],
    "one makes a group": [waiting(0), waiting(1, GROUP)],
    "all make groups": [waiting(0, GROUP), waiting(1, GROUP)],
    "more ranks are waited for than run": [waiting(0, JOIN), waiting(1, replace(JOIN, joins=(1, 4)))],
    "ranks join as the same": [waiting(one, replace(JOIN, joins=(0, 2))) for one in (0, 1)],
    "ranks look elsewhere": [waiting(one, replace(JOIN, joins=(one, 2), address=STORE)) for one in (0, 1)],
    "a backward and a collective": [in_backward(0, 1), waiting(1)],
    "a backward was left out": [with_model(in_backward(0, 1), MADE), with_model(waiting(1), MADE, in_flight=False)],
    "a backward fewer": [with_model(in_backward(0, 1), MADE), with_model(waiting(1), in_flight=False)],
    "the same bucket": [in_backward(0, 1), in_backward(1, 1)],
    "other buckets": [in_backward(0, 1), in_backward(1, 2)],
    "other models": [in_backward(0, 1), in_backward(1, 1, "Other")],
    "other groups": [waiting(0), waiting(1, replace(CALL, group="1", description="mesh_tp"))],
    "other members of a group": [
        waiting(one, replace(CALL, group="1", ranks=(one // 2 * 2, one // 2 * 2 + 1))) for one in range(4)
    ],
    "other collectives": [waiting(0), waiting(1, ROOTED)],
    "other roots": [waiting(0, ROOTED), waiting(1, replace(ROOTED, peer=1))],
    "other sizes": [waiting(0), waiting(1, replace(CALL, bytes=64, what="float32 [16]"))],
    "other numbers": [waiting(0), waiting(1, replace(CALL, sequence=17))],
    "under way": [waiting(0), waiting(1)],
    "calls that differ": [
        replace(waiting(0), flights=(flights(9),)), replace(running(1), flights=(flights(8, n7=COPY),))
    ],
    "calls that differ, one for a module": [
        replace(waiting(0, replace(CALL, sequence=7, module="experts.1")), flights=(flights(7),)),
        replace(running(1), flights=(flights(8, n7=COPY),)),
    ],
    "buffers of a forward on one rank": [
        replace(
            running(0, replace(LINE, function="DistributedDataParallel._pre_forward"), LINE),
            flights=(flights(9, n7=replace(COPY, name="broadcast")),),
        ),
        replace(running(1), flights=(flights(9),)),
    ],
    "a checkpoint is saved on a thread": [
        replace(running(0), flights=(replace(flights(9), group="saving"),)),
        replace(running(1), flights=(replace(flights(9, n7=replace(COPY, name="all_gather")), group="saving"),)),
    ],
    "calls of other sizes": [
        replace(running(one), flights=(flights(9, n7=replace(SUM, bytes=16 * (one + 1))),)) for one in (0, 1, 2)
    ],
    "of another cell": [
        replace(running(0), flights=(flights(9),), last_cell="b"),
        replace(rank(1, "idle"), flights=(flights(8, n7=COPY, begun=3),), last_cell="a"),
    ],
    **{
        f"calls that differ where all wait: {name}": [
            replace(one, flights=(flights(9),)), replace(two, flights=(flights(9, n7=COPY),))
        ]
        for name, (one, two) in {
            "a backward": (in_backward(0, 1), waiting(1)),
            "buckets": (in_backward(0, 1), in_backward(1, 2)),
            "a group": (waiting(0), waiting(1, GROUP)),
            "groups": (waiting(0), waiting(1, replace(CALL, group="1", description="mesh_tp"))),
            "calls": (waiting(0), waiting(1, ROOTED)),
        }.items()
    },
    "silent and idle": [rank(0, "silent"), rank(1, "idle")],
    "two are stopped, nobody waits": [rank(one, "stopped", why=f"kill -CONT {one}") for one in (0, 1)],
    "frames and seconds": [
        running(0, *DEEP[:4], seconds=1.0), running(1, *DEEP[:5], seconds=0.9),
        running(2, *(replace(one, text="y" * (140 - len(f"{one} in {one.function}: "))) for one in DEEP[:6])),
    ],
    "one has launched more": [replace(running(0), flights=(AGED,)), replace(running(1), flights=(flights(4),))],
    "one has launched and the other ended": [
        replace(running(0), flights=(AGED,)), replace(rank(1, "idle"), flights=(flights(4),))
    ],
    "one has launched and all ended": [
        replace(rank(0, "idle"), flights=(AGED,)), replace(rank(1, "idle"), flights=(flights(4),))
    ],
}  # fmt: skip


PROCESSES = {"under way": ("the controller is stopped <by a signal>: `kill -CONT 7` resumes it",)}


def places(ranks: list[int], group: str, number: int) -> dict[int, dict[str, Any]]:
    """Where ranks entered a collective, as they answer; rank 2 has forgotten it, rank 1 saves on a thread."""
    if group == "saving":
        file = "torch/distributed/checkpoint/_async_thread_executor.py"
        return {0: {"file": "/train.py", "line": 30}, 1: {"file": file, "line": 31}}
    return {one: {"file": f"/train_{group}.py", "line": 10 * number + one} if one < 2 else {} for one in ranks}


def test_of_ranks() -> None:
    """Every rule, in one's words and in several's; kind and whether it is a hang; the lesson that explains it."""
    told = []
    for name, ranks in HANGS.items():
        report = HangReport.of(with_places(ranks, places), processes=PROCESSES.get(name, ()))
        told.append(f"== {name}: {report.diagnosis.kind}, {report.diagnosis.stuck}\n{report}")
        told += [f"{one.rank}: {one.entered_at!r}" for one in report.ranks if one.entered_at]
    approved("hangs", "\n\n".join(told))


@pytest.mark.parametrize(
    "name", ["one is stopped", "under way", "one has launched more", "nothing runs", "nobody waits"]
)
def test_as_a_table(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """What a notebook shows."""
    (tmp_path / "my notebooks" / "below").mkdir(parents=True)
    if name == "one is stopped":  # the lesson is there to be linked
        lesson = tmp_path / "my notebooks" / LESSON
        lesson.parent.mkdir()
        lesson.touch()
    monkeypatch.chdir(tmp_path / "my notebooks" / "below")
    report = HangReport.of(HANGS[name], processes=PROCESSES.get(name, ()))
    approved(f"hang as a table, {name}", report._repr_html_().replace("><", ">\n<"))


def test_of_ranks_that_fall_out_of_step() -> None:
    """How far, and what the rank behind has not entered."""
    told = []
    for name in ("one has launched more", "one has launched and the other ended", "one has launched and all ended"):
        ranks = HANGS[name]
        in_backward_of_torch = replace(ranks[0], stack=(LINE, AUTOGRAD))
        for found in distances({one.rank: one.flights for one in ranks}).values():
            told += [f"== {name}: {found}", str(diagnose_ahead(ranks, found))]
            told.append(str(diagnose_ahead(ranks, replace(found, missing=None, launched=None))))
            told.append(str(diagnose_ahead([in_backward_of_torch, ranks[1]], found)))
    for known in ((None, 9, 4), (None, 9, 9), (5, 9, 4), (5, None, 4)):
        for members in ((0, 1), (), (0, 1, 2)):
            first, *sequences = known
            pair = [replace(flights(first), sequence=one, ranks=members, description="mesh_dp") for one in sequences]
            told.append(f"{known} of {members}: {distances({0: [pair[0]], 1: [pair[1]]})}")
    told.append(
        str(distances({0: [flights(None), replace(AGED, group="1")], 1: [flights(2), replace(flights(2), group="1")]}))
    )
    told.append(open_words([AGED, replace(AGED, open=AGED.open[1:], open_count=1)]))
    approved("ranks out of step", "\n\n".join(told))


def ofall(one: dict[str, Any]) -> dict[str, Any]:
    """The same collective of the default group."""
    return {**one, "process_group": (one["process_group"][0], "default_pg")}


def in_both(one: Dump) -> Dump:
    """The same of a rank that belongs to both groups, which have the same members."""
    config = {name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name in "12"}
    return replace(one, recorders=({**one.recorders[0], "pg_config": config},))


def message(one: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**one, "is_p2p": True, "profiling_name": "nccl:send", "state": "started", "retired": False, **changes}


def two_recorders(first: Dump, second: Dump) -> Dump:
    return replace(first, recorders=(*first.recorders, *second.recorders))


DUMPS = {
    "two recorders": [two_recorders(dump(0, entry("1", 1)), dump(0, entry("2", 5, done=False))), dump(2)],
    "one is missing": [dump(0, entry("1", 1), entry("1", 2, done=False, line=41)), dump(1, entry("1", 1))],
    "one that waits elsewhere": [dump(0, entry("1", 1, done=False)), dump(1, entry("2", 1, done=False)), dump(2)],
    "one has finished": [dump(0, entry("1", 1, done=False)), dump(1, entry("1", 1)), dump(2)],
    "all have entered": [*(dump(number, entry("1", 1, done=False)) for number in (0, 1)), dump(2)],
    "other calls": [
        dump(0, entry("1", 1), entry("1", 2, done=False)), dump(1, entry("1", 1), entry("1", 2, name="broadcast"))
    ],
    "nothing in flight": [dump(0, entry("1", 1)), dump(1, entry("1", 1)), dump(2)],
    "on its way": [dump(0, entry("1", 1, done=False, at_s=999.0)), dump(1), dump(2)],
    "a message": [dump(0, {**entry("1", 1, name="send", done=False), "is_p2p": True}), dump(1), dump(2)],
    "groups in another order": [
        in_both(dump(0, entry("1", 1, done=False))), in_both(dump(1, entry("2", 1, done=False, line=50)))
    ],
    "groups in another order, on their way": [
        in_both(dump(0, entry("1", 1, done=False, at_s=999.0))),
        in_both(dump(1, entry("2", 1, done=False, at_s=999.0))),
    ],
    "two in flight": [
        in_both(dump(0, entry("1", 1, done=False), entry("2", 1, done=False, at_s=800.0))),
        in_both(dump(1, entry("1", 1), entry("1", 2), entry("2", 7))),
    ],
    "messages": [
        dump(0, message(entry("1", 1)), message(entry("1", 2))), dump(1, message(entry("1", 1), frames=[])), dump(2)
    ],
    "all on their way": [
        dump(number, entry("1", 1, done=False, at_s=at)) for number, at in enumerate((999.0, 995.0))
    ],
    "a sequence that starts late": [dump(0, entry("1", 8, done=False)), dump(1, entry("1", 7), entry("2", 3))],
    "two waits": [
        dump(0, entry("1", 1, done=False, at_s=990.0)), dump(1, entry("2", 1, done=False, at_s=980.0)), dump(2)
    ],
    "the default group": [dump(0, ofall(entry("7", 1, done=False))), dump(1, ofall(entry("7", 1)))],
    "without frames": [dump(0, {**entry("1", 1, done=False), "frames": None}), dump(1)],
    "of the future": [dump(0, entry("1", 1, done=False, at_s=1001.0)), dump(1)],
    "of Gloo, which skipped one": [
        dump(number, *({**entry("1", one, done=one < 4), "profiling_name": "gloo:all_reduce"} for one in (1, 2, 4)))
        for number in (0, 1)
    ],
    "several are missing": [dump(0, entry("1", 1, done=False)), *(dump(number) for number in range(2, 6))],
}  # fmt: skip


def test_of_dumps() -> None:
    """The diagnosis, each rank, and its collectives; with the groups' ranks, and where the dumps don't name them."""
    told = []
    for name, dumps in DUMPS.items():
        for named in (True, False):
            known = (
                dumps if named else [replace(one, recorders=({**one.recorders[0], "pg_config": {}},)) for one in dumps]
            )
            found, ranks = diagnose_dumps(known)
            told.append(f"== {name}, {'with' if named else 'without'} the groups' ranks: {found.kind}, {found.stuck}")
            told += [str(HangReport(found, ranks)), *map(str, flights_by_rank(known).items())]
            told += [f"{one.rank}: {one.entered_at!r}" for one in ranks if one.entered_at]
    approved("dumps", "\n".join(told))


def test_of_stacks() -> None:
    """What a rank waits in, from its Python and its C++ frames and its recorder."""
    fsdp = Place(f"{TORCH}/distributed/fsdp/x.py", 3, "wait", "event.wait()", users=False)
    waits = ["c10d::Work::wait libtorch_cpu.so"]
    receive, new = replace(C10D, function="recv"), replace(C10D, function="new_group")
    told = []
    for stack in ([], [C10D], [receive], [new], [BACKWARD], [fsdp], [user("work.wait()")], [user("f()")]):
        for known in ((), (FLYING,), (FLYING, replace(FLYING, group="3", description="default_pg"))):
            for native in (None, [], waits, ["cudaStreamSynchronize libcudart.so"]):
                one = snapshot_of_stack(3, [*stack, user("main()")] if stack else [], known, native)
                told.append(f"{one.waits}, {one.last_cell}, {one.runs}: {one} | {one.call}")
    told.append(str(snapshot_of_stack(3, [C10D, user("main()")], (FLYING,), waits, blocked=False)))
    approved("stacks", "\n".join(told))


def test_of_an_answer() -> None:
    """What a rank answers, with its models, calls and collectives."""
    stages = [{"state": "launched", "arrived": 2, "of": 2, "missing": []}]
    stages.append({"state": "pending", "arrived": 0, "of": 2, "missing": ["a.weight"]})
    model = {"reducer": 1, "module": "Net", "step": 7, "in_flight": True, "finalizing": False, "buckets": stages}
    told = []
    for pause in (
        None,
        {"point": "before_launch", "bucket": 3},
        {"point": "ready", "parameter": "a.weight"},
        {"point": "end"},
    ):
        answer = {"seconds": 3, "stack": [vars(LINE)], "call": {**vars(CALL), "ranks": [0, 1]}, "sequences": {"0": 4}}
        answer |= {
            "models": [{**model, "paused": pause}, {"error": "gone"}],
            "last_cell": "c",
            "debugger": pause is None,
        }
        answer["flights"] = [
            {"group": "0", "backend": "gloo", "entered": 4, "sequence": 4, "begun": 2, "open_count": 1, "ranks": [0, 1]}
            | {
                "kinds": [["all_reduce", "float32 [4]", 16]],
                "entries": [[4, 0]],
                "open": [[4, 0, 1.5, "bucket 1 of Net"]],
            }
        ]
        answer["entered_at"] = vars(SCRIPT) if pause else None
        told.append(repr(RankSnapshot.of(1, "running", answer, label="mine")))
        told.append(str(RankSnapshot.of_script({**answer, "rank": 1, "state": "running"})))
    told += [str(RankSnapshot.of_script({"rank": 1, "state": "silent", **answer})) for answer in ({}, {"why": "busy"})]
    approved("answers", "\n\n".join(told))
