"""Norm and checksum of each bucket's averaged gradients on demand, to see whether all ranks have equal ones."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from ... import recording

__all__ = ["Inspected", "inspect_gradients", "install", "is_observed", "request_inspection"]

# A model that is idle for this long is not between two steps of a running loop.
_IDLE_SECONDS = 1.0
_NEVER = 2**63 - 1


class Inspected(Protocol):
    """A model's synchronizer, or the observation of one of torch's class."""

    reducer: Any
    model_id: int


# Whether each is of torch's class.
_models: weakref.WeakKeyDictionary[Inspected, bool] = weakref.WeakKeyDictionary()


def inspect_gradients(model: Inspected) -> list[dict[str, Any]]:
    """See `DistributedDataParallel.inspect_gradients`."""
    found = model.reducer.inspect_gradients()
    if found is None:
        raise RuntimeError("inspect_gradients() was called during a backward: call it after backward() has returned")
    return _as_dicts(found)


def install(model: Inspected, *, observed: bool = False) -> None:
    """Registers a model for requests; its reducer reports here when it has carried one out.

    Args:
        model: of ours, or the observation of one of torch's class.
        observed: whether it is the latter.
    """
    _models[model] = observed
    model_id = model.model_id
    model.reducer.set_inspection_callback(lambda step, found: _describe(model_id, step, found))


def is_observed(model_id: int) -> bool:
    """Whether this is the number of a model of torch's class that exists."""
    return any(observed and model.model_id == model_id for model, observed in list(_models.items()))


def request_inspection(model_id: int, step: int) -> None:
    """Inspects one model's gradients at the end of the first backward from `step` on, or now if it is idle.

    Callable from any thread. The result is a description (`recording.descriptions`) of type ``"inspection"``.

    Raises:
        KeyError: there is no such model in this process.
    """
    models = {model.model_id: model for model in list(_models)}
    if model_id not in models:
        raise KeyError(f"there is no model {model_id}; existing ones: {list(models)}")
    model = models[model_id]
    reducer = model.reducer
    reducer.request_inspection(step)
    at_step = reducer.step()
    if step < at_step:
        _inspect_now(model)
    _watch(weakref.ref(model), at_step)


def _watch(reference: weakref.ref[Inspected], at_step: int) -> None:
    """Carries out a pending request as soon as no backward has ended for `_IDLE_SECONDS`."""

    def look() -> None:
        model = reference()
        if model is None or not model.reducer.inspection_pending():
            return
        now = model.reducer.step()
        if now != at_step or not _inspect_now(model):
            _watch(reference, now)

    model = reference()
    if model is not None and model.reducer.inspection_pending():
        timer = threading.Timer(_IDLE_SECONDS, look)
        timer.daemon = True
        timer.start()


def _inspect_now(model: Inspected) -> bool:
    found = model.reducer.inspect_averages()
    if found is None:
        return False
    model.reducer.request_inspection(_NEVER)
    _describe(model.model_id, *found)
    return True


def _describe(model_id: int, step: int, found: list[tuple[float, int]]) -> None:
    recording.describe(
        {"type": "inspection", "reducer": model_id, "step": step, "buckets": _as_dicts(found, as_text=True)}
    )


def _as_dicts(found: list[tuple[float, int]], *, as_text: bool = False) -> list[dict[str, Any]]:
    # JSON's numbers can't hold 64 bits
    return [
        {"bucket": index, "norm": norm, "checksum": f"{checksum:016x}" if as_text else checksum}
        for index, (norm, checksum) in enumerate(found)
    ]
