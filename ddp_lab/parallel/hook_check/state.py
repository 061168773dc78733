"""Copies of a comm hook's state, so that trials do not change the user's."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist

__all__ = ["copy_of_state"]


def copy_of_state(state: object) -> tuple[object, bool]:
    """A state that a hook may change without changing the user's, and whether it could be made.

    Process groups in it stay what they are. Attributes are copied one by one, as pickling would leave groups out.
    """
    memo: dict[int, Any] = {}
    _keep_groups(state, memo, 0)
    if isinstance(state, dist.ProcessGroup):
        return state, True
    try:
        if type(state).__module__ == "builtins":
            return copy.deepcopy(state, memo), True
        made = object.__new__(type(state))
        for name, value in _attributes(state).items():
            object.__setattr__(made, name, copy.deepcopy(value, memo))
    except Exception:  # noqa: BLE001 - whatever a class of the user's raises: it can't be copied
        return state, False
    return made, True


def _attributes(state: object) -> dict[str, Any]:
    slots = [name for kind in type(state).__mro__ for name in _slots(kind)]
    named = {name: getattr(state, name) for name in slots if hasattr(state, name)}
    return named | dict(getattr(state, "__dict__", {}))


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def _keep_groups(value: object, memo: dict[int, Any], depth: int) -> None:
    if isinstance(value, dist.ProcessGroup):
        memo[id(value)] = value
    elif depth < 3:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
        for each in inner if inner is not None else _attributes(value).values():
            _keep_groups(each, memo, depth + 1)
