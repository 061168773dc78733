"""The required contents of a rank's messages and descriptions, checked on arrival: later code may rely on them.

A description arrives over the wire, from a journal or from a file of unknown origin. Its texts are made printable, see
[Note: texts are printable from where they come in]. Fields that are not named here are kept unchanged. Of those named
here, most may be missing (older files lack some), and none may be of another type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..printable import printable_json
from .events import MOST_BUCKETS, MOST_PARAMETERS

_Check = Callable[[Any, str], None]


def integer(low: int, bound: int) -> _Check:
    """A check that a value is an integer from `low` to `bound` - 1."""

    def checked(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value < bound:
            raise ValueError(f"{where} is {_shown(value)}, not an integer from {low} to {bound - 1}")

    return checked


def _a(kind: type, wanted: str) -> _Check:
    """A check that a value is of this type; `wanted` describes it in the error."""

    def checked(value: Any, where: str) -> None:
        if not isinstance(value, kind):
            raise ValueError(f"{where} is {_shown(value)}, {wanted}")

    return checked


def _number(value: Any, where: str) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, int) and abs(value) >= _WIDE)
    ):
        raise ValueError(f"{where} is {_shown(value)}, not a number")


def _maybe(one: _Check) -> _Check:
    def checked(value: Any, where: str) -> None:
        if value is not None:
            one(value, where)

    return checked


def _list(one: _Check) -> _Check:
    def checked(value: Any, where: str) -> None:
        _a_list(value, where)
        for number, entry in enumerate(value):
            one(entry, f"{where}[{number}]")

    return checked


def _record(needed: Mapping[str, _Check], known: Mapping[str, _Check] | None = None) -> _Check:
    """A check of an object: its required and optional fields."""

    def checked(value: Any, where: str) -> None:
        _an_object(value, where)
        for name, one in needed.items():
            if name not in value:
                raise ValueError(f"{where} lacks {name!r}")
            one(value[name], f"{where}.{name}")
        for name, one in (known or {}).items():
            if name in value:
                one(value[name], f"{where}.{name}")

    return checked


def _shown(value: Any) -> str:
    """A value for an error, shortened if long."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


text = _a(str, "not a text")
_flag = _a(bool, "neither true nor false")
_a_list, _an_object = _a(list, "not a list"), _a(dict, "not an object")
_WIDE = 1 << 63
_INDEX, _BUCKET = integer(0, MOST_PARAMETERS), integer(0, MOST_BUCKETS)
_REDUCER, _STEP, _COUNT = integer(0, 1 << 20), integer(-1, 1 << 53), integer(0, 1 << 53)
_RANK, _OWN = integer(0, 1 << 31), integer(0, 1 << 20)
_PARAMETER = _record(
    {"index": _INDEX, "name": text, "bytes": _COUNT},
    {"shape": _list(_COUNT), "numel": _COUNT, "dtype": text, "device": text, "sparse": _flag},
)
_OF_BUCKET = _record(
    {"bucket": _BUCKET, "bytes": _COUNT, "parameters": _list(_INDEX)},
    {
        **dict.fromkeys(("dtype", "device", "name"), text),
        **dict.fromkeys(("sharded_bytes", "unsharded_bytes"), _COUNT),
        **dict.fromkeys(("forward_prefetch", "backward_prefetch"), _list(_BUCKET)),
        **dict.fromkeys(("reshard_after_forward", "unshard_async"), _flag),
        "mesh": _list(_record({"name": text, "size": _COUNT})),
    },
)
_OPTIONS = _record(
    {},
    {
        "find_unused_parameters": _flag,
        "static_graph": _flag,
        "gradient_as_bucket_view": _flag,
        "batched_grad_copy": _flag,
        "averages_in_place": _flag,
        "bucket_cap_mb": _maybe(_number),
        "bucket_cap_mb_list": _maybe(_list(_number)),
        "comm_hook": _maybe(text),
    },
)
_KINDS: dict[str, _Check] = {
    "mark": _record({"index": integer(0, 1 << 31), "name": text}),
    "place": _record(
        {"index": _INDEX, "part": text, "name": text},
        {"text": text, "line": _COUNT, "workers": _COUNT, "pin_memory": _flag},
    ),
    "process": _record({"host": text, "cores": _COUNT, "threads": _COUNT}, {"contexts": _list(_COUNT)}),
    "assignment": _record(
        {
            "reducer": _REDUCER,
            "generation": integer(0, 1 << 16),
            "group_ranks": _list(_RANK),
            "module": text,
            "parameters": _list(_PARAMETER),
            "buckets": _list(_OF_BUCKET),
        },
        {
            "first_step": _STEP,
            "process_group": integer(-1, 1 << 31),
            "backend": text,
            "kind": text,
            "rebuilt": _flag,
            "options": _maybe(_OPTIONS),
        },
    ),
    "gone": _record({"reducer": _REDUCER}),
    "buffers": _record({"buffers": _list(_record({"name": text, "shape": _list(_COUNT)}))}),
    "unchanged_buffers": _record(
        {
            "reducer": _REDUCER,
            "step": _STEP,
            "looks": _COUNT,
            "buffers": _list(_record({"name": text, "bytes": _COUNT})),
            "bytes": _COUNT,
        }
    ),
    "accumulation": _record(
        {
            "reducer": _REDUCER,
            "step": _STEP,
            **dict.fromkeys(("optimizer_steps", "backwards", "fewest", "most"), _COUNT),
        }
    ),
    "group": _record(
        {"index": _OWN, "name": text, "ranks": _list(_RANK)},
        {"description": text, "mesh_dimension": text, "backend": text},
    ),
    "call": _record(
        {"index": _OWN, "operation": text},
        {
            **dict.fromkeys(("dtype", "reduction", "file", "function", "module", "use"), text),
            "line": integer(-1, 1 << 31),
            "reducer": _REDUCER,
            "bucket": _BUCKET,
        },
    ),
    "value": _record({"name": text, "value": _number, "at_ns": integer(0, _WIDE)}),
    "memory": _record(
        {
            "reducer": _REDUCER,
            "parameters": _list(
                _record(
                    {
                        "name": text,
                        "shape": _list(_COUNT),
                        "trained": _flag,
                        **dict.fromkeys(("bytes", "state", "counters"), _COUNT),
                    }
                )
            ),
            "modules": _list(_record({"name": text, "inputs_require_grad": _flag})),
            **dict.fromkeys(("buffers", "buckets"), _COUNT),
            **dict.fromkeys(("views", "copies"), _flag),
            "ranks": integer(1, 1 << 31),
            "marks": _record(
                {
                    "part": _list(text),
                    "index": _list(integer(-1, MOST_PARAMETERS)),
                    **dict.fromkeys(("bytes", "peak", "gradients"), _list(_COUNT)),
                }
            ),
        }
    ),
    "inspection": _record(
        {
            "reducer": _REDUCER,
            "step": _STEP,
            "buckets": _list(_record({"bucket": _BUCKET, "norm": _number, "checksum": text})),
        }
    ),
    "gradients": _record(
        {
            "reducer": _REDUCER,
            "step": _STEP,
            "generation": integer(0, 1 << 16),
            "ranks": _list(_RANK),
            "before": _list(_list(_maybe(_number))),
            "after": _list(_maybe(_number)),
            "nonfinite": _maybe(_record({"kind": text, "rank": _RANK, "parameter": _maybe(text)})),
            "seconds": _number,
        }
    ),
    "drift": _record(
        {
            "reducer": _REDUCER,
            "step": _STEP,
            "ok": _flag,
            "first": _maybe(text),
            "groups": _list(_list(_RANK)),
            "seconds": _number,
        },
        {"differing": _COUNT, "tensors": _COUNT, "bytes": _COUNT, "error": text},
    ),
}
_COMMON = _record({}, {"type": text, "session": _maybe(integer(0, _WIDE))})
_MESSAGES: dict[str, dict[str, _Check]] = {
    "describe": {"descriptions": _a_list, "session": integer(0, _WIDE)},
    "status": {"status": _an_object},
    "flushed": {"cell": text},
    "cell": {"cell": text, "kind": text},
    "error": {"text": text},
    "hello": {},
    "bye": {},
    "reply": {"id": integer(0, _WIDE), "reply": _an_object},
}


def message_of(frames: list[Any]) -> tuple[int, dict[str, Any]]:
    """The sending rank of a message of the wire, and the message; its second frame is JSON.

    Only messages of type ``"cell"`` have more frames.

    Raises:
        ValueError: it is invalid; the message says why.
    """
    if len(frames) < 2:
        raise ValueError(f"a message has {len(frames)} frames, expected 2")
    message = json.loads(bytes(frames[1]))
    _an_object(message, "a message")
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in _MESSAGES:
        raise ValueError(f"a message has the unknown type {str(kind)[:40]!r}")
    if len(frames) > 2 and kind != "cell":
        raise ValueError(f"a message of type {kind!r} has {len(frames)} frames, expected 2")
    rank = message.get("rank")
    _RANK(rank, f"the rank in a message of type {kind!r}")
    for name, one in _MESSAGES[kind].items():
        one(message.get(name), f"{name!r} in a message of type {kind!r}")
    return rank, message


def checked(description: Any) -> dict[str, Any]:
    """Checks one description; returns it with texts that can be shown anywhere.

    Raises:
        ValueError: it is invalid; the message names the field, its value and what is expected.
    """
    _COMMON(description, "a description")
    kind = description.get("type")
    if kind in _KINDS:
        _KINDS[kind](description, f"a description of type {kind!r}")
    if kind == "assignment":
        _check_members(description)
    if kind == "gradients":
        _check_table(description)
    if kind == "memory":
        _check_marks(description)
    try:
        shown: dict[str, Any] = printable_json(description)
    except RecursionError as error:
        raise ValueError("a description contains too deeply nested lists") from error
    return shown


def _check_table(gradients: Mapping[str, Any]) -> None:
    """Checks that there is a norm for each rank and bucket."""
    ranks, buckets = len(gradients["ranks"]), len(gradients["after"])
    if not ranks or not buckets or [len(row) for row in gradients["before"]] != [buckets] * ranks:
        raise ValueError(f"norms of gradients do not match {ranks} ranks and {buckets} buckets")


def _check_marks(memory: Mapping[str, Any]) -> None:
    """Checks that the marks are of known parts, and that their indices exist."""
    marks = memory["marks"]
    if len({len(column) for column in marks.values()}) != 1 or not marks["part"]:
        raise ValueError("the marks of a step's memory have columns of different lengths, or there are none")
    size_of = dict.fromkeys(("forward", "forward end", "backward"), len(memory["modules"]))
    size_of |= {"gradient": len(memory["parameters"])} | dict.fromkeys(
        ("begin", "optimizer", "optimizer end", "end"), 0
    )
    for part, index in zip(marks["part"], marks["index"], strict=True):
        if part not in size_of or (size_of[part] and not 0 <= index < size_of[part]):
            raise ValueError(f"a mark of a step's memory is {_shown(part)} with index {index}, which does not exist")


def _check_members(assignment: Mapping[str, Any]) -> None:
    """Checks that the buckets are numbered from 0, and that their parameters are described."""
    known = {one["index"] for one in assignment["parameters"]}
    for number, bucket in enumerate(assignment["buckets"]):
        if bucket["bucket"] != number:
            raise ValueError(f"a bucket layout has bucket {bucket['bucket']} in place {number}")
        if not bucket["parameters"] or not known.issuperset(bucket["parameters"]):
            raise ValueError(f"bucket {number} of a bucket layout has no parameter, or one that is not described")
