"""Client side: objects, and functions of the notebook, as parcels for ranks.

Functions, closures and classes that ranks can't import travel by value (cloudpickle); see [Note: names of a function
that was brought] in `ddp_lab.protocol.functions`. With DDP_LAB_SHARED_MEMORY=0 in the environment, large buffers
travel in messages.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ...control.interrupts import interrupts_deferred
from ...documentation import with_help
from ...errors import ClusterError, FallbackWarning
from ...protocol.functions import RANKS_OWN, Pickler, culprit, rank_globals
from ...protocol.parcels import UNPICKLABLE, Parcel, Pickled, TensorBuffers, Unsent, pickled, unpack, why_not
from ...protocol.shared_memory import Segments
from .results import RemoteValue

_SEND_SEGMENTS = 32
_RECEIVE_SEGMENTS = 64  # of all ranks together
_OFF = "DDP_LAB_SHARED_MEMORY"
_REMEDY = "omit it, or create it on the ranks in a %%distributed cell"


class _Globals:
    """A placeholder for a namespace of the client; ranks substitute their own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return rank_globals, (self._name,)


class _Pickler(Pickler):
    """cloudpickle's pickler, with buffers for tensors; functions fall back to the rank's names."""

    def __init__(self, file: Any, buffer_callback: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.tensors = TensorBuffers()
        self._globals: dict[int, _Globals] = {}

    def reducer_override(self, obj: Any) -> Any:
        reduced = self.tensors.reduce(obj)
        if reduced is not None:
            return reduced
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
            make, (code, own, *arguments), (attributes, parts), *rest = reduced
            mentioned = {n: v for n, v in parts["__globals__"].items() if n not in RANKS_OWN}
            behind = self._globals.setdefault(id(own), _Globals(obj.__globals__.get("__name__", "__main__")))
            return make, (code, behind, *arguments), (attributes, {**parts, "__globals__": mentioned}), *rest
        return reduced


def pickled_for_ranks(values: Mapping[str, Any], verb: str) -> Pickled:
    """Pickles named values as one object, a dict.

    Raises:
        TypeError: a value can't be pickled; the message names it, the part that can't be, and a fix.
    """
    try:
        return pickled(dict(values), _Pickler)
    except UNPICKLABLE as error:
        raise _refusal(values, verb, error) from error


@contextlib.contextmanager
def shared(value: Pickled, far: Collection[int] = ()) -> Iterator[Parcel]:
    """A parcel for all ranks, until the block ends.

    Args:
        value: the object.
        far: ranks among them that share no memory with this process; if there are any, the parcel holds all data.
    """
    segments = _segments(min(value.size + 1, _SEND_SEGMENTS) if value.size and not far else 0)
    try:
        yield _placed(value, segments)
    finally:
        if segments is not None:
            with interrupts_deferred():
                segments.close()


class Receiving:
    """Segments into which ranks write their results; use it as a context manager, or `close` it.

    Args:
        ranks: which.
        count: segments of all ranks together; every rank gets one at least.
        far: ranks that share no memory with this process: they get none.
    """

    def __init__(self, ranks: Sequence[int], count: int = _RECEIVE_SEGMENTS, far: Collection[int] = ()) -> None:
        share = max(1, count // len(ranks))
        self._segments = {rank: _segments(0 if rank in far else share) for rank in ranks}

    def request(self) -> dict[str, Any]:
        """What ranks need for their answers: their segments, whether torch is loaded here, the notebook's own names."""
        references = {rank: each.references() for rank, each in self._segments.items() if each is not None}
        return {"segments": references, "torch": "torch" in sys.modules, "known": _names_of_notebook()}

    def unpack(self, what: str, rank: int, parcel: Parcel) -> Any:
        """A rank's object.

        Raises:
            ClusterError: it can't be loaded here.
        """
        segments = self._segments[rank]
        if segments is not None and parcel.inline:
            say_in_messages(f"rank {rank} can't write to this process's shared memory, or there is not enough")
        try:
            return unpack(parcel, segments.descriptors if segments is not None else ())
        except (ImportError, AttributeError) as error:
            raise ClusterError(f"{what} of rank {rank} can't be loaded here: {error}") from error

    def close(self) -> None:
        """Releases the segments; unpacked objects stay."""
        with interrupts_deferred():
            for each in self._segments.values():
                if each is not None:
                    each.close()

    def __enter__(self) -> Receiving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FunctionCall:
    """A call of a function on ranks: what is sent, and what is returned.

    Args:
        function: of any module, the notebook or a closure; the names that it uses travel with it.
        args: its arguments.
        kwargs: its keyword arguments.
        ranks: where it will run.
        far: ranks among them that share no memory with this process.

    Raises:
        TypeError: it is a generator or coroutine function, or something it needs can't be pickled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        ranks: Sequence[int],
        far: Collection[int] = (),
    ) -> None:
        name = _name_of(function)
        _check_kind(function, name)
        needs = {name: function, **{f"argument {i}": each for i, each in enumerate(args)}, **kwargs}
        try:
            packed = pickled((function, tuple(args), dict(kwargs)), _Pickler)
        except UNPICKLABLE as error:
            raise _refusal(needs, "sent to a rank", error) from error
        self._name = name
        self._values: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()
        self._receiving = self._stack.enter_context(Receiving(ranks, 8, far))
        self.args = (self._stack.enter_context(shared(packed, far)), self._receiving.request())
        self.sources = _sources_of(function)

    def values(self, answers: Mapping[int, Any]) -> dict[int, Any]:
        """rank -> value of the ranks that have answered."""
        for rank in [rank for rank in answers if rank not in self._values]:
            answer = answers[rank]
            if isinstance(answer, Parcel):
                answer = self._receiving.unpack(f"the value of {self._name}", rank, answer)
            elif isinstance(answer, Unsent):
                answer = RemoteValue(rank, answer.kind, "", answer.why)
            self._values[rank] = answer
        return dict(self._values)

    def close(self) -> None:
        """Releases shared memory: no rank will begin or answer any more."""
        self._stack.close()


def _segments(count: int) -> Segments | None:
    """New segments; None if there can be none, or none are needed."""
    if not count or os.environ.get(_OFF) == "0":
        return None
    try:
        return Segments(count)
    except OSError as error:
        say_in_messages(str(error))
        return None


def say_in_messages(why: str) -> None:
    """Warns that large objects take the slower way."""
    said = with_help(f"large arrays travel in messages instead of shared memory: {why}", "no-shared-memory")
    warnings.warn(said, FallbackWarning, stacklevel=2)


def _placed(value: Pickled, segments: Segments | None) -> Parcel:
    if segments is not None:
        try:
            return value.into(segments.descriptors, segments.references())
        except OSError as error:  # no memory for it besides that of ipyparallel
            say_in_messages(str(error))
    return value.inline()


def _refusal(values: Mapping[str, Any], verb: str, error: BaseException) -> TypeError:
    name, path, part, why = culprit(values, lambda part: why_not(part, _Pickler)) or ("", "", None, str(error))
    if part is None or not path:
        return TypeError(f"{next(iter(values), 'it')} can't be {verb}: {why}")
    told = why if path == name else f"{path} (a {type(part).__name__}) can't: {why}"
    return TypeError(f"{name} (a {type(values[name]).__name__}) can't be {verb}: {told}; {_REMEDY}")


def _names_of_notebook() -> frozenset[str]:
    """Classes and functions that were defined here, at the top level."""
    kinds = (type, types.FunctionType)
    names = vars(sys.modules["__main__"])
    return frozenset(
        name
        for name, value in list(names.items())
        if isinstance(value, kinds) and value.__module__ == "__main__" and value.__qualname__ == name
    )


def _plain_function(function: Any) -> Any:
    """What a partial, a method or a callable object runs."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, type) and not hasattr(function, "__code__"):
        function = getattr(function, "__func__", None) or getattr(type(function), "__call__", function)  # noqa: B004
    return getattr(function, "__func__", function)


def _name_of(function: Any) -> str:
    return str(getattr(_plain_function(function), "__qualname__", type(function).__name__)).rpartition("<locals>.")[2]


def parameters_of(function: Any) -> list[str]:
    """The names of the parameters that can be given by name; empty if they are not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some that are written in C
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return [one.name for one in parameters if one.kind in by_name and one.name not in bound]


def _check_kind(function: Any, name: str) -> None:
    plain = _plain_function(function)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise TypeError(f"{name} is a generator function, and generators can't be sent: return a list instead")
    if inspect.iscoroutinefunction(plain):
        raise TypeError(f"{name} is a coroutine function: call it with await in a %%distributed cell")


def _sources_of(function: Any) -> dict[str, str]:
    """The text of the file a function was written in, if ranks can't read it themselves."""
    code = getattr(_plain_function(function), "__code__", None)
    if code is None or os.path.exists(code.co_filename):
        return {}
    lines = linecache.getlines(code.co_filename)
    return {code.co_filename: "".join(lines)} if lines else {}
