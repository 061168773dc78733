"""Where this rank is, read off its main thread's frames without stopping it: the rank side of `lab.doctor()`.

A thread that waits in C++ (a collective, a sleep, the end of a backward) still has its Python frames: which function of
torch it called, with which tensors, from which line of the user's. None of the rank's code runs for it, and nothing is
sent to other ranks.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined, unused-ignore]
from torch.distributed import distributed_c10d as c10d

from ... import native
from ...engine.groups import registry
from ...parallel.live.model import LiveModel, live_models
from ...protocol.messages import CallSite, FindCallSite, plain
from ..snapshot import UNNAMED, RankSnapshot
from ..stacks import COLLECTIVE, GROUP, POINT_TO_POINT, entered, is_users
from . import own_collectives

_C = native.load()
_WAIT = re.compile(r"(\w+)\.wait\(")  # of a Work
_FUNCTIONAL = c10d.__file__.replace("distributed_c10d", "_functional_collectives")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_FULLY_SHARDS = os.path.join("_fully_shard", "_fsdp_param_group.py")
_FRAMES = 40  # at most, innermost first
_DEEPEST, _USERS = 1_000, 4  # frames among which, and of which at most so many of the user's are looked for further out


def examine(thread: int, running: str | None, began: tuple[str, int] | None, *, whole: bool = True) -> dict[str, Any]:
    """What this rank is doing now, JSON-able. Called on another thread than the main one.

    Args:
        thread: the main thread's identifier.
        running: id of the running cell; None between cells.
        began: id and begin (host time in ns) of that cell, or of the last one; None before the first.
        whole: with ``flights``, for which torch's recorders are dumped; else these are empty.

    Returns:
        ``cell`` and ``seconds`` of the running cell; ``stack``: frames from the innermost outwards (far out only the
        user's), each ``file``, ``line``, ``function``, ``text`` (the part of the line that is being executed, if
        known) and ``users`` (whether it is the user's own code); ``call``: the function of torch.distributed in which
        it is, or None: ``name``, ``kind`` (``"collective"``, ``"point to point"`` or ``"group"``), ``group`` (its
        name), ``ranks`` of the group, ``what`` (sizes and types of the tensors), ``bytes``, ``peer`` (source or
        destination), ``sequence`` (on its group), ``members`` (of a group that is being created), ``joins``,
        ``address`` and ``module`` (see `Call`); ``sequences``: group -> collectives entered; ``flights``:
        the value of `own_collectives.collectives`, ``last_cell`` the cell from which it counts; ``models``: for each
        ``reducer``, ``module``, ``forwards`` (pairs, see `Model`) and the value of `breakpoints.stage`.
    """
    frame = sys._current_frames().get(thread)
    stack = [] if frame is None else [one for one, _ in islice(traceback.walk_stack(frame), _DEEPEST)]
    frames = stack[:_FRAMES]
    outer = islice((one for one in stack[_FRAMES:] if is_users(one.f_code.co_filename)), _USERS)  # of a compiler, say
    return {
        "cell": running,
        "seconds": (time.monotonic_ns() - began[1]) / 1e9 if began is not None and began[0] == running else 0.0,
        "stack": [_described(one) for one in (*frames, *outer)] if running is not None else [],
        "call": _call(frames, thread) if running is not None else None,
        "sequences": registry.sequences(),
        "flights": own_collectives.collectives(began[1] if began is not None else None) if whole else [],
        "last_cell": began[0] if began is not None else None,
        "models": [_model(model) for model in live_models()],
    }


def find_call_site(request: FindCallSite) -> CallSite:
    """Where the user's code entered a collective; on a thread of torch's, where torch's code did, with its path from
    torch on.
    """
    found = own_collectives.frames_of(request.group, request.number)
    for name, line in found:
        if is_users(name):
            return CallSite(name, line)
    for name, line in reversed(found):
        if name.startswith(_TORCH):
            return CallSite(os.path.join("torch", name.removeprefix(_TORCH)), line)
    return CallSite()


def waited_in(error: BaseException) -> str:
    """What a rank waited in when it was unblocked, from its exception; "" if it did not wait. On the main thread."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = {"seconds": 0.0, "stack": [], "call": _call(frames[::-1]), "sequences": {}}
    # A failed backward no longer waits: its buckets show what it waited in.
    backward = any(frame.f_code.co_name == "_engine_run_backward" for frame in frames)
    models = [{**_model(model), "finalizing": True} for model in live_models()] if backward else []
    return RankSnapshot.of(0, "running", found | {"models": models}).waits_in


def _described(frame: FrameType) -> dict[str, Any]:
    code = frame.f_code
    return {
        "file": code.co_filename,
        "line": frame.f_lineno or 0,  # generated code may have none
        "function": getattr(code, "co_qualname", code.co_name),  # from Python 3.11 on
        "text": _text(frame),
        "users": is_users(code.co_filename),
    }


def _text(frame: FrameType) -> str:
    """The expression that is being executed; the whole line if that is unknown, or spans several lines."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).rstrip("\n")
    if sys.version_info >= (3, 11) and frame.f_lasti >= 0:
        places = list(frame.f_code.co_positions())
        first, last, begin, end = places[min(frame.f_lasti // 2, len(places) - 1)]
        if first == last == frame.f_lineno and begin is not None and end is not None:
            return line.encode()[begin:end].decode(errors="replace")
    return line.strip()


def _call(frames: list[FrameType], thread: int | None = None) -> dict[str, Any] | None:
    """The outermost function of torch.distributed that the thread is in, or what it waits for by a handle."""
    found = entered((one.f_code.co_filename, one.f_code.co_name) for one in frames)
    if found is None:
        return (_message(thread) or _work(frames[0]) or _functional(frames)) if frames else None
    name, kind, given = found.name, found.kind, dict(frames[found.place].f_locals)
    group = given.get("group") if kind != GROUP else None
    tensors = list(_tensors(given))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    call = _entered(name, kind, group)
    made = {**call, "what": _what(tensors), "bytes": size, "peer": _peer(given, call["ranks"])}
    made["module"] = _sharded_module(frames[found.place :])
    if name == "init_process_group":
        made |= _joined(given)
    return {**made, **_being_made(frames[: found.place])} if kind == GROUP else made


def _sharded_module(frames: list[FrameType]) -> str:
    """The module whose parameters `fully_shard` gathers or reduces with this call; "" if it is not one of its own."""
    for one in frames:
        if one.f_code.co_filename.endswith(_FULLY_SHARDS):
            return str(getattr(one.f_locals.get("self"), "_module_fqn", None) or "")
    return ""


def _joined(given: dict[str, Any]) -> dict[str, Any]:
    """As which rank `init_process_group` joins, of how many, and where: as it was given, or as the launcher says."""
    try:
        joins = [
            int(os.environ[key]) if given[key.lower()] == -1 else given[key.lower()] for key in ("RANK", "WORLD_SIZE")
        ]
    except (KeyError, ValueError):
        return {}
    address = str(given.get("init_method") or "")
    return {"joins": joins, "address": "" if address.startswith("env://") else address}


def _being_made(frames: list[FrameType]) -> dict[str, Any]:
    """Name and members of the group that is being created, once torch has chosen its name."""
    for one in frames:
        if one.f_code.co_name == "_new_group_with_tag" and one.f_locals.get("group_name"):
            return {"group": str(one.f_locals["group_name"]), "members": list(one.f_locals.get("ranks") or ())}
    return {}


def _entered(name: str, kind: str, group: Any) -> dict[str, Any]:
    """The fields of a call before its arguments are inspected."""
    record = _record(group)
    return {
        "name": name,
        "kind": kind,
        "group": record.name if record is not None else "",
        "ranks": _ranks(group, record),
        "what": "",
        "bytes": 0,
        "peer": None,
        "sequence": record.sequence if record is not None else None,
        "description": "" if record is None else own_collectives.description_of(record),
    }


def _message(thread: int | None) -> dict[str, Any] | None:
    """A send or receive whose handle the thread waits for, e.g. in ``dist.irecv(tensor, 0).wait()``."""
    awaited = None if thread is None else _C.awaited_message(thread)
    if awaited is None:
        return None
    sends, peer, group = awaited
    record = next((one for one in registry.alive() if one.name == group), None)
    call = _entered("send" if sends else "recv", POINT_TO_POINT, record and record.group)
    return {**call, "peer": call["ranks"][peer] if 0 <= peer < len(call["ranks"]) else None}


def _work(frame: FrameType) -> dict[str, Any] | None:
    """An asynchronous collective that the innermost line waits for: it knows its operation, not its group."""
    match = _WAIT.search(_text(frame))
    if match is None:
        return None
    work = frame.f_locals.get(match[1], frame.f_globals.get(match[1]))
    if not isinstance(work, dist.Work) or work.is_completed():
        return None
    kind: int = work._get_op_type()  # type: ignore[attr-defined, unused-ignore]
    name = OpType(kind).name.lower().strip("_")
    name = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}.get(name, name)
    name = UNNAMED if name == "unknown" else name
    return _entered(name, POINT_TO_POINT if name in ("send", "recv", "recvanysource") else COLLECTIVE, None)


def _functional(frames: list[FrameType]) -> dict[str, Any] | None:
    """A functional collective whose result the thread waits for: the oldest that has not ended."""
    waits = any(one.f_code.co_filename == _FUNCTIONAL and one.f_code.co_name == "wait_tensor" for one in frames)
    oldest = own_collectives.in_flight().oldest if waits else None
    return None if oldest is None else {**_entered(oldest.name, COLLECTIVE, None), "sequence": oldest.number}


def _record(group: Any) -> registry.GroupRecord | None:
    """The record of a group; None means the default one."""
    if group is None or group is getattr(dist.group, "WORLD", None):
        group = c10d._get_default_group() if dist.is_initialized() else None
    return next((one for one in registry.alive() if group is not None and one.group is group), None)


def _ranks(group: Any, record: registry.GroupRecord | None) -> list[int]:
    if record is not None and record.ranks:
        return list(record.ranks)
    return list(range(dist.get_world_size())) if dist.is_initialized() else []


def _tensors(given: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among a function's arguments: the first that holds any."""
    for name in ("tensor", "tensors", "input", "output", "tensor_list", "input_tensor", "output_tensor", "object_list"):
        value = given.get(name)
        if isinstance(value, torch.Tensor):
            yield value
            return
        if isinstance(value, list | tuple) and value and all(isinstance(one, torch.Tensor) for one in value):
            yield from value
            return


def _what(tensors: list[torch.Tensor]) -> str:
    if not tensors:
        return ""
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    shape = str(list(tensors[0].shape)) if len(tensors) == 1 else f"{len(tensors)} tensors"
    return f"{'/'.join(types)} {shape}"


def _peer(given: dict[str, Any], ranks: list[int]) -> int | None:
    """The source or destination, as a global rank; torch takes it as one, or as a place in the group."""
    for key in ("src", "dst"):
        value, place = given.get(key), given.get(f"group_{key}")
        if isinstance(value, int):
            return value
        if isinstance(place, int) and 0 <= place < len(ranks):
            return ranks[place]
    return None


def _model(model: LiveModel) -> dict[str, Any]:
    try:
        stage = plain(model.breakpoints.stage())
    except RuntimeError as error:  # its buckets are being rebuilt at this moment
        stage = {"error": "".join(traceback.format_exception_only(error)).strip()}
    forwards = list(model.sync.forwards.copy().items())
    return {"reducer": model.sync.model_id, "module": type(model.sync.module).__name__, "forwards": forwards, **stage}
