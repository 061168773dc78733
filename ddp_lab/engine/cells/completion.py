"""Rank side: completes names and attributes of the rank's namespace, also while a cell runs.

[Note: looking without touching]
Completions are asked for while the main thread computes, so nothing of the user's is called: attributes are read where
they are stored (instance dictionaries, a module's parameters, slots and C descriptors), properties and calls are not
followed. `dir()` may be the user's own: it runs on a thread that is not waited for longer than `_SECONDS`.
"""

from __future__ import annotations

import ast
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["beside", "complete", "install", "value_of"]

_SECONDS = 0.2
_MOST = 1_000
_C_ATTRIBUTES = (types.GetSetDescriptorType, types.MemberDescriptorType)
_Look = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
_MODULE_DICTIONARIES = ("_modules", "_parameters", "_buffers")


class _NotStoredError(LookupError):
    """Nothing is known of it without calling something."""


def install(channel: Any) -> None:
    """Answers the control message ``complete`` (`telemetry.Telemetry.on_control`)."""
    channel.on_control(
        "complete", beside(lambda request, names: {"matches": complete(str(request["text"]), names)}, "complete")
    )


def beside(look: _Look, name: str, seconds: float = _SECONDS) -> Callable[..., Any]:
    """An answer that is looked for on a thread of its own.

    Args:
        look: from the request and the rank's namespace to the reply.
        name: of the thread.
        seconds: for which it is waited for.
    """
    worker: threading.Thread | None = None

    def work(request: Mapping[str, Any], reply: dict[str, Any]) -> None:
        try:
            reply.update(look(request, _namespace()))
        except Exception as error:  # noqa: BLE001  the thread's top; a user's dir() may raise anything
            reply["error"] = f"{type(error).__name__}: {error}"

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal worker
        if worker is not None and worker.is_alive():  # in a dir() that does not end
            return {}
        reply: dict[str, Any] = {}
        worker = threading.Thread(target=work, args=(request, reply), name=f"ddp_lab-{name}", daemon=True)
        worker.start()
        worker.join(seconds)
        return dict(reply)

    return answer


def complete(text: str, namespace: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names that `text` may go on with, each with its kind.

    Args:
        text: a name, or attributes and literal subscripts of one, e.g. ``"model.layers[0].we"``.
        namespace: where names are looked up.

    Returns:
        Pairs of the last name, completed, and ``"module"``, ``"class"``, ``"function"`` or ``"instance"``.
    """
    path, dot, begun = text.rpartition(".")
    try:
        if not dot:
            return _fitting(begun, list(namespace), namespace.__getitem__)
        holder = value_of(ast.parse(path.strip(), mode="eval").body, namespace)
        return _fitting(begun, dir(holder), lambda name: _attribute(holder, name))
    except (SyntaxError, LookupError, AttributeError):
        return []


def _namespace() -> dict[str, Any]:
    """The user's names on this rank."""
    from IPython import get_ipython

    shell = get_ipython()
    hidden, nothing = shell.user_ns_hidden, object()
    return {name: value for name, value in list(shell.user_ns.items()) if hidden.get(name, nothing) is not value}


def _fitting(begun: str, names: Iterable[Any], stored: Any) -> list[tuple[str, str]]:
    found = sorted(name for name in names if isinstance(name, str) and name.startswith(begun))
    if not begun.startswith("_"):
        found = [name for name in found if not name.startswith("_")]
    return [(name, _kind(name, stored)) for name in found[:_MOST]]


def _kind(name: str, stored: Any) -> str:
    try:
        value = stored(name)
    except (LookupError, AttributeError):
        return "instance"
    if isinstance(value, types.ModuleType):
        return "module"
    if isinstance(value, type):
        return "class"
    return "function" if inspect.isroutine(value) or isinstance(value, staticmethod | classmethod) else "instance"


def value_of(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """What an expression of names, attributes and literal subscripts stands for, without calling anything."""
    if isinstance(node, ast.Name):
        return namespace[node.id]
    if isinstance(node, ast.Attribute):
        return _attribute(value_of(node.value, namespace), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return _item(value_of(node.value, namespace), node.slice.value)
    raise _NotStoredError


def _item(holder: Any, key: Any) -> Any:
    if type(holder) in (list, tuple, dict):
        try:
            return holder[key]
        except TypeError:
            raise _NotStoredError from None
    children = _dictionary(holder).get("_modules")  # of a Sequential or a ModuleList
    if isinstance(children, dict) and isinstance(key, int | str):
        return children[str(key)]
    raise _NotStoredError


def _attribute(holder: Any, name: str) -> Any:
    own = _dictionary(holder)
    if isinstance(holder, types.ModuleType):
        return own[name]
    for place in _MODULE_DICTIONARIES:
        stored = own.get(place)
        if isinstance(stored, dict) and name in stored:
            return stored[name]
    found = inspect.getattr_static(holder, name)
    if isinstance(found, _C_ATTRIBUTES):
        return found.__get__(holder, type(holder))
    if isinstance(found, property) or (name not in own and _computes(found)):
        raise _NotStoredError
    return found


def _computes(found: Any) -> bool:
    """Whether reading it calls a descriptor of Python code."""
    return isinstance(inspect.getattr_static(type(found), "__get__", None), types.FunctionType)


def _dictionary(holder: Any) -> Mapping[str, Any]:
    try:
        own = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, Mapping) else {}
