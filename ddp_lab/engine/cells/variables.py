"""Rank side of push, pull and function calls: sets and reads names of the rank's namespace.

[Note: a push in two halves]
`stage` loads what was pushed, on every rank; only when all ranks have it does the client ask them to `bind` it. So a
value that can't be loaded, a rank that is lost or an interrupt leaves the variables of all ranks as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...serialization.functions import collected
from ...serialization.parcels import Parcel, Unsent, unpack
from . import values

__all__ = ["bind", "call", "read", "stage"]

_staged: tuple[str, dict[str, Any]] = ("", {})


def stage(token: str, parcel: Parcel) -> bool:
    """Loads variables that `bind` will set; False if the parcel's segments can't be reached from here.

    Args:
        token: names this push.
        parcel: name -> value.
    """
    global _staged
    _staged = ("", {})
    try:
        _staged = (token, unpack(parcel))
    except OSError:
        if not parcel.spans:
            raise
        return False
    return True


def bind(token: str) -> None:
    """Sets the variables that were staged under this token."""
    from IPython import get_ipython

    global _staged
    staged, _staged = _staged, ("", {})
    if staged[0] != token:
        raise RuntimeError("another push came in between: push again")
    get_ipython().push(staged[1])


def read(expression: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The value of a variable or expression.

    Args:
        expression: evaluated in the rank's namespace.
        request: see `values.answer`.

    Returns:
        ``state``: "ok", "unknown" (a name or attribute that is not there) or "kept" (it can't leave the rank);
        ``parcel``: the value; ``why``, and ``kind`` (its type's name) where it is kept.
    """
    from IPython import get_ipython

    try:
        value = eval(expression, get_ipython().user_ns)
    except (NameError, AttributeError) as error:
        return {"state": "unknown", "why": str(error)}
    try:
        return {"state": "ok", "parcel": values.answer(expression, value, request)}
    except values.NotPortableError as error:
        return {"state": "kept", "why": str(error), "kind": type(value).__name__}


def call(parcel: Parcel, request: Mapping[str, Any]) -> Parcel | Unsent:
    """Calls a function that the client sent, and returns its value for the client.

    Args:
        parcel: the function, its arguments and its keyword arguments.
        request: see `values.answer`.
    """
    with collected() as namespaces:
        try:
            function, args, kwargs = unpack(parcel)
        except OSError as error:
            if parcel.spans:
                raise OSError(f"{error}; with DDP_LAB_SHARED_MEMORY=0 set, objects are sent in messages") from error
            raise
    try:
        value = function(*args, **kwargs)
    finally:
        for each in namespaces:
            each.set_on_rank()
    try:
        return values.answer("the value", value, request)
    except values.NotPortableError as error:
        return Unsent(type(value).__name__, str(error))
