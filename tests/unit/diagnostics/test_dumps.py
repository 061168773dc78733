"""Why a job hangs, from made-up dumps of its ranks' Flight Recorders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_lab.diagnostics.dumps import Dump, diagnose_dumps

NOW_NS = 1_000_000_000_000
LIBRARY = {"name": "all_reduce", "filename": "/v/lib/python3.11/site-packages/torch/distributed/x.py", "line": 7}


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


def sentence(dumps: Sequence[Dump], kind: str) -> str:
    found, ranks = diagnose_dumps(dumps)
    assert found.kind == kind, found
    assert [one.rank for one in ranks] == [one.rank for one in dumps]
    return found.sentence


def test_a_rank_is_missing() -> None:
    """Named with what it did last; the collective with its group, line and seconds. Rank 0 waits for rank 1, which
    waits on its other group for rank 2."""
    told = sentence([dump(0, entry("1", 1), entry("1", 2, done=False, line=41)), dump(1, entry("1", 1))], "busy")
    assert told.startswith(
        "rank 0 waits in all_reduce #2 of 16 B (float32 [4]) on mesh dimension dp (ranks 0–1) at train.py:41, "
        "for 100 s; rank 1 has not entered it: the last call of rank 1, all_reduce #1"
    )
    assert told.endswith("at train.py:40, ended. There is no dump of rank 2.")
    dumps = [dump(0, entry("1", 1, done=False)), dump(1, entry("2", 1, done=False, line=50)), dump(2)]
    told = sentence(dumps, "busy")
    assert told.startswith("rank 1 waits in all_reduce #1 of 16 B (float32 [4]) on mesh dimension tp (ranks 1–2)")
    assert "rank 2 has not entered it: rank 2 has recorded no collective" in told


def test_groups_in_another_order() -> None:
    """Two ranks that belong to the same two groups wait for each other. Gloo's dumps don't name them: who is in no
    collective is suspected, or else the order of the groups."""
    first, second = dump(0, entry("1", 1, done=False)), dump(1, entry("2", 1, done=False, line=50))
    for one in (first, second):
        one.recorders[0]["pg_config"].update({name: {"name": name, "ranks": "[0, 1]"} for name in "12"})
    told = sentence([first, second], "groups")
    assert "rank 0 in all_reduce #1" in told
    assert "dp (ranks 0–1) at train.py:40; rank 1 in all_reduce #1" in told
    dumps = [dump(0, entry("1", 1, done=False)), dump(1), dump(2)]
    for one in dumps:
        one.recorders[0]["pg_config"].clear()
    told = sentence(dumps, "busy")
    assert "on mesh dimension dp at train.py:40, for 100 s; ranks 1 and 2 are in no collective" in told
    other = dump(1, entry("2", 1, done=False, line=50))
    other.recorders[0]["pg_config"].clear()
    told = sentence([dumps[0], other], "groups")
    assert "rank 1 in all_reduce #1 of 16 B (float32 [4]) on mesh dimension tp at train.py:50" in told


def test_different_calls() -> None:
    """The first number under which the ranks entered different collectives, with the lines."""
    dumps = [
        dump(0, entry("1", 1), entry("1", 2, done=False, line=41)),
        dump(1, entry("1", 1), entry("1", 2, name="broadcast", done=False, line=42)),
    ]
    told = sentence(dumps, "mismatch")
    assert "rank 0 entered all_reduce #2 of 16 B (float32 [4]) on mesh dimension dp (ranks 0–1) at train.py:41" in told
    assert "rank 1 broadcast #2 of 16 B (float32 [4]) on mesh dimension dp (ranks 0–1) at train.py:42" in told


def test_what_is_not_stuck() -> None:
    """A job that was dumped for another reason, and one whose collective has just begun: dumps of a healthy job are not
    of one moment. If all have entered, the collective itself is slow."""
    found, _ = diagnose_dumps([dump(rank, entry("1", 1)) for rank in (0, 1)] + [dump(2)])
    assert (found.kind, found.stuck, found.sentence) == ("working", False, "Nothing was in flight on ranks 0, 1 and 2.")
    found, _ = diagnose_dumps([dump(0, entry("1", 1, done=False, at_s=999.0)), dump(1), dump(2)])
    assert not found.stuck
    dumps = [dump(rank, entry("1", 1, done=False)) for rank in (0, 1)]
    assert "ranks 0 and 1 are all in all_reduce #1" in sentence([*dumps, dump(2)], "slow")
