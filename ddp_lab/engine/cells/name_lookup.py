"""Rank side: completes names of the rank's namespace, and answers Shift-Tab on one, also while a cell runs.

[Note: looking without touching]
Both run while the main thread computes, so none of the user's code is called: attributes are read where they
are stored (instance dictionaries, a module's parameters, slots and C descriptors), properties and calls are not
followed. Only plain values are shown by `repr`; for tensors and modules, their stored fields are shown. `dir()` may be
the user's own: it runs on a thread that is waited for at most `_SECONDS`.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from ...protocol.messages import Complete, Completions, LookUp, Page

_SECONDS, _HELP_SECONDS = 0.2, 0.8
_MOST = 1_000
_C_ATTRIBUTES = (types.GetSetDescriptorType, types.MemberDescriptorType)
_Asked = TypeVar("_Asked")
_Reply = TypeVar("_Reply")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (str, bytes, list, tuple, dict, set, frozenset, bytearray, range)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type(str.join), type(object.__init__))
_TEXT = 200  # characters of a plain value
_CHILDREN = 12  # of a module
_MODULE_DICTIONARIES = ("_modules", "_parameters", "_buffers")


class _NotStoredError(LookupError):
    """The value is not known without calling something."""


def install(channel: Any) -> None:
    """Answers the messages `Complete` and `LookUp` (`telemetry.Telemetry.on_control`)."""

    def completed(request: Complete, names: Mapping[str, Any]) -> Completions:
        return Completions(complete(request.text, names))

    def described(request: LookUp, names: Mapping[str, Any]) -> Page:
        return Page(inspection_page(request.text, names, request.source))

    channel.on_control(Complete, on_worker_thread(completed, Completions))
    channel.on_control(LookUp, on_worker_thread(described, Page, _HELP_SECONDS))


def on_worker_thread(
    look: Callable[[_Asked, Mapping[str, Any]], _Reply], failed: Callable[..., _Reply], seconds: float = _SECONDS
) -> Callable[[_Asked], _Reply]:
    """An answer that is computed on a thread of its own.

    Args:
        look: computes the reply from the request and the rank's namespace.
        failed: makes an empty reply, with an ``error`` in words.
        seconds: how long to wait for it.
    """
    worker: threading.Thread | None = None

    def work(request: _Asked, replies: list[_Reply]) -> None:
        try:
            replies.append(look(request, _namespace()))
        except Exception as error:  # noqa: BLE001  the thread's top; a user's dir() may raise anything
            replies.append(failed(error=f"{type(error).__name__}: {error}"))

    def answer(request: _Asked) -> _Reply:
        nonlocal worker
        if worker is not None and worker.is_alive():  # in a dir() that does not end
            return failed()
        replies: list[_Reply] = []
        worker = threading.Thread(target=work, args=(request, replies), name="ddp_lab-look-up", daemon=True)
        worker.start()
        worker.join(seconds)
        return replies[0] if replies else failed()

    return answer


def complete(text: str, namespace: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Completions of `text`, each with its kind.

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
        holder = _value_of(ast.parse(path.strip(), mode="eval").body, namespace)
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


def _value_of(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """The value of an expression of names, attributes and literal subscripts, without calling anything."""
    if isinstance(node, ast.Name):
        return namespace[node.id]
    if isinstance(node, ast.Attribute):
        return _attribute(_value_of(node.value, namespace), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return _item(_value_of(node.value, namespace), node.slice.value)
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


def inspection_page(text: str, namespace: Mapping[str, Any], source: bool = False) -> list[tuple[str, str]]:
    """The help on a name.

    Args:
        text: a name, or attributes and literal subscripts of one, e.g. ``"model.layers[0].weight"``.
        namespace: where names are looked up; after it, Python's builtins.
        source: with its source text instead of its documentation.

    Returns:
        Pairs of title and text; empty if there is no such name, or its value is computed on access.
    """
    try:
        found = _value_of(ast.parse(text.strip(), mode="eval").body, {**vars(builtins), **namespace})
    except (SyntaxError, LookupError, AttributeError):
        return []
    return [(title, words) for title, words in _described(text.strip(), found, source) if words]


def _described(name: str, found: Any, source: bool) -> Iterator[tuple[str, str]]:
    if isinstance(found, (*_FUNCTIONS, type)):
        yield "Signature", _signature(name, found)
    yield "Type", type(found).__name__
    if type(found) in _PLAIN:
        yield "Value", _short(repr(found))
    elif isinstance(found, torch.Tensor):
        yield "Tensor", _tensor(found)
    elif isinstance(found, torch.nn.Module):
        yield from _module(found)
    if type(found) in _SIZED:
        yield "Length", str(len(found))
    described = found if isinstance(found, (*_FUNCTIONS, type, types.ModuleType)) else type(found)
    yield "File", _quietly(inspect.getfile, described)
    text = _quietly(inspect.getsource, described) if source else ""
    if text:
        yield "Source", text
    else:
        yield "Docstring", _documentation(described)


def _signature(name: str, found: Any) -> str:
    if isinstance(found, type) and type(found) is not type:
        return ""  # its metaclass may compute it
    signature = _quietly(inspect.signature, found)
    return f"{name}{signature}" if signature else ""


def _tensor(found: torch.Tensor) -> str:
    words = [f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)} on {found.device}"]
    if found.requires_grad:
        words.append("requires grad")
    if isinstance(found, torch.nn.Parameter):
        words.append("a parameter")
    return ", ".join(words)


def _module(found: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Parameters and children as they are stored: a module's own methods may be the user's."""
    parameters: dict[int, torch.Tensor] = {}
    waiting, seen = [found], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        stored = vars(one)
        parameters.update({id(each): each for each in stored["_parameters"].values() if each is not None})
        waiting += [child for child in stored["_modules"].values() if child is not None]
    count = sum(each.numel() for each in parameters.values())
    yield "Parameters", f"{count:,} in {len(parameters)} tensors" if parameters else "none"
    children = [f"{name}: {type(child).__name__}" for name, child in vars(found)["_modules"].items()]
    more = [f"and {len(children) - _CHILDREN} more"] if len(children) > _CHILDREN else []
    yield "Children", ", ".join(children[:_CHILDREN] + more)


def _documentation(described: Any) -> str:
    if isinstance(described, type):
        own = next((vars(each)["__doc__"] for each in type.mro(described) if vars(each).get("__doc__")), None)
    else:
        own = getattr(described, "__doc__", None)
    return inspect.cleandoc(own) if isinstance(own, str) else ""


def _quietly(look_up: Callable[[Any], Any], found: Any) -> str:
    """The answer of `inspect` as text; "" if it has none."""
    try:
        return str(look_up(found))
    except (TypeError, ValueError, OSError):
        return ""


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
