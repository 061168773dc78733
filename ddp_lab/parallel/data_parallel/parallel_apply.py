"""Several modules at the same time, each on its device and in its thread."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .devices import Device, Resolved, device_of, resolve_device, resolve_devices

__all__ = ["parallel_apply"]


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> list[Any]:
    """Calls each module with its inputs, all at the same time; a single one in the calling thread.

    Grad mode, inference mode and autocast (for CPU and accelerator, with its dtype) are the caller's, and so are
    context variables; on an accelerator the caller's current stream of that device is used.

    Args:
        modules: the modules to call.
        inputs: for each module a tuple or list of arguments, or one argument.
        kwargs_tup: for each module its keyword arguments.
        devices: for each module its device; None: that of the first tensor among its inputs.

    Returns:
        The output of each module.

    Raises:
        AssertionError: the lists' lengths differ.
        Exception: the first failed module's, of the same class, with its replica and device in the message and the
            original as its cause.
    """
    count = len(modules)
    for name, given in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if given is not None and len(given) != count:
            raise AssertionError(f"The number of modules {count} is not equal to the number of {name} {len(given)}")
    named = [{} for _ in modules] if kwargs_tup is None else kwargs_tup
    places = _resolve([None] * count if devices is None else devices, inputs)
    calls = [_Call(*each) for each in zip(range(count), modules, inputs, named, places, strict=True)]
    if count == 1:
        calls[0].run()
    else:
        enter_modes = _modes()
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(enter_modes, call.run), name=f"replica-{i}")
            for i, call in enumerate(calls)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [call.result() for call in calls]


def _resolve(devices: Sequence[Device | None], inputs: Sequence[Any]) -> list[Resolved]:
    given = [device for device in devices if device is not None]
    if len(given) == len(devices):
        return resolve_devices(given)
    places: list[Resolved] = []
    for i, (device, arguments) in enumerate(zip(devices, inputs, strict=True)):
        tensor = _first_tensor(arguments)
        if device is None and tensor is None:
            raise RuntimeError(
                f"in replica {i}, no device was provided and no tensor input was found; device cannot be resolved"
            )
        places.append(device_of(tensor) if device is None and tensor is not None else resolve_device(device or 0, i))
    return places


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in map(_first_tensor, items) if found is not None), None)


class _Call:
    """One module's call, its result or what it raised."""

    def __init__(self, index: int, module: nn.Module, inputs: Any, kwargs: dict[str, Any], device: Resolved) -> None:
        self._index = index
        self._module = module
        self._inputs = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
        self._kwargs = kwargs
        self._device = device
        # taken here: a new thread would start with the device's default stream
        self._stream = torch.accelerator.current_stream(device) if isinstance(device, int) else None
        self._output: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Calls the module and stores its result or error."""
        try:
            with self._on_device():
                self._output = self._module(*self._inputs, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._stream is None or not isinstance(self._device, int):
            yield
        else:
            with torch.accelerator.device_index(self._device), self._stream:
                # A new thread has no CUDA context before its first call that needs one; cuBLAS warns of that.
                self._stream.query()
                yield

    def result(self) -> Any:
        """What the module returned; raises what it raised."""
        if self._error is not None:
            raise _retold(self._error, f"in replica {self._index} on device {self._device}") from self._error
        return self._output


def _retold(error: BaseException, where: str) -> BaseException:
    """An exception of the same class with its origin in the message, or a RuntimeError if that can't be made."""
    original = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"Caught {type(error).__name__} {where}.\nOriginal {original}"
    if isinstance(error, KeyError):
        return KeyError(_Text(text))
    try:
        return type(error)(text)
    except Exception:  # noqa: BLE001 - a class whose constructor wants other arguments
        return RuntimeError(text)


class _Text(str):
    """A KeyError shows its argument's repr: this one has line breaks."""

    def __repr__(self) -> str:
        return str(self)


def _modes() -> Callable[[Callable[[], None]], None]:
    """The calling thread's modes: a function that runs another in these modes, in a thread that then ends."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocast = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in types]

    def enter(run: Callable[[], None]) -> None:
        torch.set_autocast_cache_enabled(cache)
        for name, enabled, dtype in autocast:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            run()

    return enter
