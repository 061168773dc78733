"""Records every collective, send and receive of every process group of this process, whoever starts it.

[Note: every collective of every group]
C++ sees each of them where it passes torch's dispatcher (`csrc/comm/collective_interception.h`), and records events
(`csrc/observe/group_collectives.h`). What is the same each time (operation, dtype, reduction, the user's line, the
module) is a description of type ``"call"``, and what a group is one of type ``"group"``. Both are made here, when the
recorder is drained: on the thread that does that, once.

A mesh dimension is known by the description that `DeviceMesh` gives its groups. Nothing of torch's is wrapped.
"""

from __future__ import annotations

import json
import os
import sysconfig
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ... import native, recording
from ..core.process_groups import group_index

__all__ = ["record"]

_C = native.load()
_MESH = "mesh_"  # the beginning of the description of a mesh dimension's group


def record() -> None:
    """Records every collective from now on, while the recorder is on; a second call has no effect."""
    if _describe_new not in recording.before_descriptions:
        recording.before_descriptions.append(_describe_new)
        _C.record_group_collectives(_libraries())
        _C.make_gloo_abortable()  # these tell when a thread waits for them, too


def _libraries() -> list[str]:
    """Beginnings of the files that are not the user's."""
    paths = sysconfig.get_paths()
    ours, torchs = (os.path.dirname(file) + os.sep for file in (native.__file__, torch.__file__))
    return [ours, torchs, *(paths[kind] + os.sep for kind in ("purelib", "platlib", "stdlib", "platstdlib"))]


def _describe_new() -> None:
    groups = {made[0]: made for made in _C.take_new_groups()}
    if groups:
        for group in list(c10d._world.pg_map):
            number = group_index(group)
            if number in groups:
                recording.describe(_group(group, *groups.pop(number)))
        for made in groups.values():  # of no group that torch knows, or that no longer exists
            recording.describe(_group(None, *made))
    for call in _C.take_new_calls():
        recording.describe(json.loads(call))


def _group(group: Any, index: int, name: str, description: str, backend: str, size: int) -> dict[str, Any]:
    ranks = dict(c10d._world.pg_group_ranks).get(group)  # global rank -> rank in the group
    made: dict[str, Any] = {"type": "group", "index": index, "name": name, "backend": backend}
    made["ranks"] = list(range(size)) if ranks is None else sorted(ranks, key=ranks.__getitem__)
    if ranks is not None:
        by_device = str(c10d._world.pg_backend_config.get(group, backend)).split(",")  # "cpu:gloo", ...
        names = {one.rpartition(":")[2] for one in by_device}
        made["backend"] = names.pop() if len(names) == 1 else ",".join(by_device)
    if description and description != "undefined":
        made["description"] = description
    if description.startswith(_MESH) and description != f"{_MESH}default":
        made["mesh_dimension"] = description.removeprefix(_MESH)
    return made
