"""Rank side: what Shift-Tab shows of a name, also while a cell runs.

As with completions, nothing of the user's is called for it: see [Note: looking without touching]. So there is no `repr`
of any object but plain values; of tensors and modules there is what they store.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from . import completion

__all__ = ["install", "sections"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (str, bytes, list, tuple, dict, set, frozenset, bytearray, range)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type(str.join), type(object.__init__))
_SECONDS = 0.8
_TEXT = 200  # characters of a plain value
_CHILDREN = 12  # of a module


def install(channel: Any) -> None:
    """Answers the control message ``help`` (`telemetry.Telemetry.on_control`)."""
    channel.on_control("help", completion.beside(_reply, "help", _SECONDS))


def sections(text: str, namespace: Mapping[str, Any], source: bool = False) -> list[tuple[str, str]]:
    """What there is to say of a name.

    Args:
        text: a name, or attributes and literal subscripts of one, e.g. ``"model.layers[0].weight"``.
        namespace: where names are looked up; after it, Python's builtins.
        source: with its source text instead of its documentation.

    Returns:
        Pairs of title and text; empty if there is no such name, or it is computed when it is asked for.
    """
    try:
        found = completion.value_of(ast.parse(text.strip(), mode="eval").body, {**vars(builtins), **namespace})
    except (SyntaxError, LookupError, AttributeError):
        return []
    return [(title, words) for title, words in _described(text.strip(), found, source) if words]


def _reply(request: Mapping[str, Any], namespace: Mapping[str, Any]) -> dict[str, Any]:
    return {"sections": sections(str(request["text"]), namespace, bool(request.get("source")))}


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
    """What `inspect` finds out, as text; "" where it finds nothing."""
    try:
        return str(look_up(found))
    except (TypeError, ValueError, OSError):
        return ""


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
