"""Rank side of push, pull and function calls: sets and reads names of the rank's namespace.

[Note: a push in two halves]
`stage` loads the pushed values on every rank; only when all ranks have them does the client ask them to `bind` them. So
a value that can't be loaded, a lost rank or an interrupt leaves the variables of all ranks unchanged.

Objects sent by a rank can be loaded by the client. A model, an optimizer or a scheduler is sent as its `state_dict()`.
A client that has imported torch gets tensors, on the host. For one that has not, a tensor
becomes a numpy array wherever it is: in a list, a dict, a dataclass, an attribute. dtypes that numpy lacks (bfloat16,
float8) become float32; a 0-dim tensor becomes a numpy scalar. `torch.Size` becomes a tuple, `torch.dtype` and
`torch.device` their names.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any

from ...protocol import parcels
from ...protocol.functions import collected, culprit
from ...protocol.shared_memory import opened

_SMALL_BYTES = 1 << 16
_SMALL_ITEMS = 1_000
_SCALARS = (type(None), bool, int, float, complex)

_staged: tuple[str, dict[str, Any]] = ("", {})


def stage(token: str, parcel: parcels.Parcel) -> bool:
    """Loads variables that `bind` will set; False if the parcel's segments are not accessible here.

    Args:
        token: names this push.
        parcel: name -> value.
    """
    global _staged
    _staged = ("", {})
    try:
        _staged = (token, parcels.unpack(parcel))
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
        raise RuntimeError("another push replaced this one: push again")
    get_ipython().push(staged[1])


def read(expression: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The value of a variable or expression.

    Args:
        expression: evaluated in the rank's namespace.
        request: see `answer`.

    Returns:
        ``state``: "ok", "unknown" (a missing name or attribute) or "kept" (it can't be sent);
        ``parcel``: the value; ``why``, and ``kind`` (its type's name) where it is kept.
    """
    from IPython import get_ipython

    try:
        value = eval(expression, get_ipython().user_ns)
    except (NameError, AttributeError) as error:
        return {"state": "unknown", "why": str(error)}
    try:
        return {"state": "ok", "parcel": answer(expression, value, request)}
    except NotPortableError as error:
        return {"state": "kept", "why": str(error), "kind": type(value).__name__}


def call(parcel: parcels.Parcel, request: Mapping[str, Any]) -> parcels.Parcel | parcels.Unsent:
    """Calls a function that the client sent, and returns its value for the client.

    Args:
        parcel: the function, its arguments and its keyword arguments.
        request: see `answer`.
    """
    with collected() as namespaces:
        try:
            function, args, kwargs = parcels.unpack(parcel)
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
        return answer("the value", value, request)
    except NotPortableError as error:
        return parcels.Unsent(type(value).__name__, str(error))


class NotPortableError(TypeError):
    """An object contains something that only exists on the rank; the message names it."""


class _Pickler(pickle.Pickler):
    """Pickles objects of classes that the client knows, and refuses others by name.

    Args:
        file: the file to write to.
        buffer_callback: as `pickle.Pickler`'s.
        torch: whether the client has torch.
        known: names of the client's own classes and functions.
    """

    def __init__(
        self, file: Any, buffer_callback: Any = None, torch: bool = False, known: Collection[str] = ()
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.tensors = parcels.TensorBuffers()
        self._torch = torch
        self._known = known

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)):
            if getattr(obj, "__module__", None) == "__main__" and obj.__qualname__ in self._known:
                return parcels.of_notebook, (obj.__qualname__,)
            _refuse_foreign(obj, self._torch)
            return NotImplemented
        if hasattr(type(obj), "state_dict") and hasattr(type(obj), "load_state_dict"):
            return parcels.same, (obj.state_dict(),)
        torch = sys.modules.get("torch")
        reduced = None if self._torch or torch is None else _without_torch(torch, obj)
        if reduced is None:
            reduced = self.tensors.reduce(obj)
        return NotImplemented if reduced is None else reduced


def to_bytes(value: Any) -> bytes:
    """Pickles `value` so that a process without torch, and without this rank's cells, can load it.

    Args:
        value: any object; costs one copy of its tensors to the host.

    Returns:
        The pickled bytes.

    Raises:
        NotPortableError: the object contains something that can't be sent; the message names it.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except NotPortableError:
        raise
    except parcels.UNPICKLABLE as error:
        raise NotPortableError(str(error)) from error
    return buffer.getvalue()


def answer(name: str, value: Any, request: Mapping[str, Any]) -> parcels.Parcel:
    """A parcel for the client, its buffers in the segments that the client made for this rank.

    Args:
        name: how the value is called in errors.
        value: any object.
        request: ``segments`` (rank -> references), ``torch`` (whether the client has it), ``known`` (names of the
            client's own classes and functions).

    Raises:
        NotPortableError: the object contains something that can't be sent; the message names it.
    """

    def pickler(file: Any, buffer_callback: Any) -> _Pickler:
        return _Pickler(file, buffer_callback, torch=request["torch"], known=request["known"])

    try:
        packed = parcels.pickled(value, pickler)
    except parcels.UNPICKLABLE as error:
        found = culprit({name: value}, lambda part: parcels.why_not(part, pickler))
        why = str(error) if found is None or found.path == name else f"{found.path}: {found.why}"
        raise NotPortableError(why) from error
    references = request["segments"].get(int(os.environ["DDP_LAB_RANK"]), ())
    if packed.size and references:
        try:
            with opened(references, write=True) as descriptors:
                return packed.into(descriptors)
        except OSError:  # they are not accessible here, or there is no memory for them
            pass
    return packed.inline()


def is_small(value: Any) -> bool:
    """Whether `value` is plain data of at most 64 KiB and 1,000 items: cheap enough to send automatically."""
    items = 0
    size = 0
    stack = [value]
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    while stack:
        each = stack.pop()
        items += 1
        kind = type(each)
        if kind in (str, bytes):
            size += len(each)
        elif kind in (list, tuple, set, frozenset):
            items += len(each)
            stack.extend(each if items <= _SMALL_ITEMS else ())
        elif kind in (dict, collections.OrderedDict):
            items += len(each)
            stack.extend((*each.keys(), *each.values()) if items <= _SMALL_ITEMS else ())
        elif torch is not None and kind is torch.Tensor:
            size += each.numel() * each.element_size()
        elif numpy is not None and (kind is numpy.ndarray or isinstance(each, numpy.generic)):
            size += each.nbytes if not each.dtype.hasobject else _SMALL_BYTES + 1
        elif kind not in _SCALARS:
            return False
        if items > _SMALL_ITEMS or size > _SMALL_BYTES:
            return False
    return True


def _without_torch(torch: Any, obj: Any) -> Any:
    """The value of `reducer_override` for an object of torch if the client has no torch; None for any other."""
    if isinstance(obj, torch.Tensor):
        import operator

        array = _as_array(torch, obj)
        return (operator.itemgetter(()), (array,)) if array.ndim == 0 else parcels.reduced_array(array)
    if isinstance(obj, torch.Size):
        return tuple, (list(obj),)
    if isinstance(obj, (torch.dtype, torch.device)):
        return str, (str(obj),)
    return None


def _as_array(torch: Any, tensor: Any) -> Any:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    return tensor.numpy()


def _refuse_foreign(obj: Any, torch: bool) -> None:
    module = getattr(obj, "__module__", None) or ""
    kind = "class" if isinstance(obj, type) else "function"
    if module == "__main__":
        raise NotPortableError(f"{kind} {obj.__qualname__} was defined on the rank, and the client does not have it")
    if module.partition(".")[0] == "torch" and not torch:
        raise NotPortableError(f"{kind} {module}.{obj.__qualname__} needs torch, which the client does not import")
