"""Objects sent between the client and a rank: a pickle, and its large buffers separately.

[Note: how objects travel]
Buffers of `LARGE` bytes and more (arrays, tensors' storages) are not in the pickle but written once into segments
(see `ddp_lab.protocol.shared_memory`), from where each receiver maps them: no other copy is made. An array that is
not contiguous is copied first. A large pickle itself is sent in the same way.

A tensor is pickled by torch except for its storage, which is one buffer: tensors that share memory still do so at the
other end, within one transfer. Only the part of a storage that pickled tensors use is written; the rest is a hole that
takes no memory. Storages on a GPU are copied to the host.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .shared_memory import Reference, Span, fill, mapped, opened

LARGE = 1 << 18
UNPICKLABLE = (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError, BufferError)
"""The exceptions of picklers."""
_PROTOCOL = 5
_Part = tuple[memoryview, int, int]  # bytes, and the used part of them


@dataclass(frozen=True)
class Parcel:
    """The message for an object.

    Attributes:
        head: its pickle; empty if that is in the first span.
        spans: places of its buffers in segments.
        references: where the segments are; empty if the receiver has them already.
        inline: its buffers, if there are no segments.
    """

    head: bytes
    spans: tuple[Span, ...] = ()
    references: tuple[Reference, ...] = ()
    inline: tuple[bytes | bytearray, ...] = ()


@dataclass(frozen=True)
class Unsent:
    """Replaces a value that can't be sent: its type's name, and the reason."""

    kind: str
    why: str


@dataclass(frozen=True)
class Pickled:
    """A pickled object whose large buffers have not been copied; it shares memory with the object.

    Attributes:
        head: the pickle.
        buffers: each with its used part.
    """

    head: bytes
    buffers: list[_Part] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many buffers go into segments, including a large pickle."""
        return len(self.buffers) + (len(self.head) >= LARGE)

    def inline(self) -> Parcel:
        """A parcel that contains all data."""
        copies = tuple(bytes(view) if view.readonly else bytearray(view) for view, _, _ in self.buffers)
        return Parcel(self.head, inline=copies)

    def into(self, descriptors: Sequence[int], references: tuple[Reference, ...] = ()) -> Parcel:
        """A parcel whose buffers were written into segments.

        Raises:
            OSError: there is no memory for them.
        """
        if not self.size:
            return Parcel(self.head)
        apart = len(self.head) >= LARGE
        parts: list[_Part] = [(memoryview(self.head), 0, len(self.head))] if apart else []
        return Parcel(b"" if apart else self.head, fill(descriptors, [*parts, *self.buffers]), references)


def pickled(value: Any, pickler: Callable[..., Any]) -> Pickled:
    """Pickles an object; its large buffers are not copied.

    Args:
        value: the object.
        pickler: makes a pickler with an attribute ``tensors`` of a file and a `buffer_callback`.
    """
    kept: list[pickle.PickleBuffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LARGE:
            return True
        kept.append(buffer)
        return False

    file = io.BytesIO()
    made = pickler(file, keep)
    made.dump(value)
    return Pickled(file.getvalue(), [(buffer.raw(), *made.tensors.part(buffer)) for buffer in kept])


def why_not(value: Any, pickler: Callable[..., Any]) -> str | None:
    """Why a value can't be `pickled`; None if it can."""
    try:
        pickled(value, pickler)
    except UNPICKLABLE as error:
        return str(error)
    return None


def unpack(parcel: Parcel, descriptors: Sequence[int] = ()) -> Any:
    """The object of a parcel, on memory of its own.

    Args:
        parcel: from the other side.
        descriptors: of its segments, if they are this process's own.

    Raises:
        OSError: its segments can't be opened here.
    """
    if not parcel.spans:
        return pickle.loads(parcel.head, buffers=parcel.inline)
    if parcel.references:
        with opened(parcel.references) as theirs:
            buffers = mapped(theirs, parcel.spans)
    else:
        buffers = mapped(descriptors, parcel.spans)
    head: bytes | memoryview = parcel.head
    if not head:
        head, *buffers = buffers
    return pickle.loads(head, buffers=buffers)


class TensorBuffers:
    """Reduces arrays and torch's storages to buffers; one for each pickler. See [Note: how objects travel]."""

    def __init__(self) -> None:
        self._touched: dict[int, tuple[int, int]] = {}  # address of a storage -> the part used by tensors
        self._address_of: dict[int, int] = {}  # id of a PickleBuffer -> address of its storage

    def reduce(self, obj: Any) -> Any:
        """The value of `reducer_override` for an array, a tensor or a storage; None for anything else."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and type(obj) is numpy.ndarray:
            return reduced_array(obj)
        if torch is None:
            return None
        if isinstance(obj, torch.Tensor):
            return self._tensor(torch, obj)
        if isinstance(obj, torch.storage.TypedStorage):
            return typed_storage, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            return self._storage(torch, obj)
        return None

    def part(self, buffer: pickle.PickleBuffer) -> tuple[int, int]:
        """The used part of a buffer: its first byte, and the one after its last."""
        return self._touched.get(self._address_of.get(id(buffer), 0), (0, buffer.raw().nbytes))

    def _tensor(self, torch: Any, tensor: Any) -> Any:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # some subclasses have none
            return None
        plain = type(tensor) is torch.Tensor and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        if tensor.device.type != "cpu":
            if not plain or tensor.numel() * tensor.itemsize >= storage.nbytes():
                return None
            tensor = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
            storage = tensor.untyped_storage()
        self._touch(storage.data_ptr(), tensor)
        if not plain or tensor.__dict__:
            return None
        size, step = tuple(tensor.shape), tensor.stride()
        return strided_tensor, (storage, tensor.dtype, tensor.storage_offset(), size, step, tensor.requires_grad)

    def _touch(self, address: int, tensor: Any) -> None:
        """Records which part of the storage at an address a tensor uses."""
        begin = tensor.storage_offset() * tensor.itemsize
        steps = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
        end = begin + (sum(steps) + 1) * tensor.itemsize if tensor.numel() else begin
        low, high = self._touched.get(address, (begin, end))
        self._touched[address] = (min(low, begin), max(high, end))

    def _storage(self, torch: Any, storage: Any) -> Any:
        if storage.device.type == "meta":
            return None
        host = storage if storage.device.type == "cpu" else storage.cpu()
        if not host.nbytes():
            return untyped_storage, (bytearray(),)
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host).numpy()
        buffer = pickle.PickleBuffer(memory)
        self._address_of[id(buffer)] = storage.data_ptr() if host is storage else 0
        return untyped_storage, (buffer,)


def reduced_array(array: Any) -> Any:
    """The value of `reducer_override` for a numpy array: its memory as a buffer, if it contains no objects."""
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    return (array if contiguous or array.dtype.hasobject else array.copy(order="C")).__reduce_ex__(_PROTOCOL)


def untyped_storage(buffer: Any) -> Any:
    """A storage of torch on a buffer."""
    torch = sys.modules["torch"]
    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def strided_tensor(storage: Any, dtype: Any, offset: int, size: Any, stride: Any, requires_grad: bool) -> Any:
    """A tensor on a storage; offset and strides count elements."""
    made = sys.modules["torch"].empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)
    return made.requires_grad_(requires_grad)


def typed_storage(storage: Any, dtype: Any) -> Any:
    """The object from which torch's own functions take a tensor's memory."""
    return sys.modules["torch"].storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def same(value: Any) -> Any:
    """Its argument: a reduction to another object."""
    return value


def of_notebook(name: str) -> Any:
    """A class or function of the notebook, by name."""
    return getattr(sys.modules["__main__"], name)
