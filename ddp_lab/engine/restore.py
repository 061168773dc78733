"""Copies variables from one rank to the others, so that training continues after a rank was restarted.

[Note: restoring]
A rank that lacks one of the chosen variables gets all of them, in one pickle: an optimizer there still refers to the
parameters of its model, and a function or class of a cell still uses the rank's own namespace (its globals are pickled
as a reference, not as a copy). A rank that has them all keeps its objects and loads their states. Rank-specific values
are adapted: names that the rank already has (`rank`, `device`, ...) stay, a `DistributedSampler` gets the rank's own
number, and tensors of the source's device are put on the rank's own.

A model's reducer is not copied: with the same parameters and the same history all ranks build a new one together.
"""

from __future__ import annotations

import io
import pickle
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DistributedSampler

from ..parallel.core.synchronizer import GradientSynchronizer
from ..parallel.distributed import DistributedDataParallel
from ..parallel.live.model import live_models
from ..protocol.functions import Pickler

_NAMESPACE = "namespace"
_Models = (DistributedDataParallel, TorchDDP)


def copy_state_from(source: int, *names: str) -> list[str]:
    """Copies variables of rank `source` to all other ranks; all ranks must call it with the same arguments.

    Ranks that lack one of them get all of them. The others keep their objects, and load the states of modules,
    optimizers and other objects with `load_state_dict`. Models continue with their comm hooks and step numbers.
    Values of a rank's own are adapted: `rank` and `device` stay, and a `DistributedSampler` gets the rank's number.
    `ddp_lab.restore_from` is the same function.

    Args:
        source: the rank that has them.
        names: variables of its namespace; none: all that have a state, and all others that some rank lacks and that can
            be copied. Given ones without a state replace those of other ranks.

    Returns:
        The names that were copied.

    Raises:
        ValueError: there is no such rank, or the ranks call it with different arguments.
        NameError: `source` does not have one of `names`.
        TypeError: one of `names` can't be copied; the message says why.

    Example:
        >>> ddp_lab.copy_state_from(0)  # in a %%distributed cell; rank 1 was killed, and restarted
    """
    if not dist.is_initialized():
        raise RuntimeError("copy_state_from copies between ranks: call it in a %%distributed cell, on all ranks")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if not 0 <= source < world_size:
        raise ValueError(f"there is no rank {source}: the ranks are 0 to {world_size - 1}")
    namespace = _namespace()
    asked: list[Any] = [None] * world_size
    dist.all_gather_object(asked, (source, names, sorted(_users(namespace))))
    if len({one[:2] for one in asked}) > 1:
        calls = "; ".join(f"rank {other}: {(one[0], *one[1])}" for other, one in enumerate(asked))
        raise ValueError(f"all ranks must call copy_state_from with the same arguments ({calls})")
    said: list[Any] = [None]
    if rank == source:
        try:
            said[0] = _offer(namespace, names, [set(one[2]) for one in asked])
        except Exception as error:  # noqa: BLE001  the others wait for an answer: the error is raised on all ranks
            said[0] = {"error": TypeError(f"the variables of rank {source} can't be sent: {error}")}
    dist.broadcast_object_list(said, src=source)
    offer = said[0]
    if offer["error"] is not None:
        raise offer["error"]
    takes_all = rank != source and not set(offer["names"]) <= set(asked[rank][2])
    if takes_all:
        models = _take_all(namespace, offer)
    else:
        if rank != source:
            _take_states(namespace, offer, named=bool(names))
        models = [_find(namespace, *each) for each in zip(offer["models"], offer["names_of_models"], strict=True)]
    for model, history in zip(models, offer["models"], strict=True):
        _go_on(model, history)
    if takes_all and offer["left"]:
        left = "; ".join(f"{name} ({why})" for name, why in offer["left"].items())
        warnings.warn(f"not copied from rank {source}: {left}", stacklevel=2)
    return list(offer["names"])


# -- the source


def _offer(namespace: dict[str, Any], names: Sequence[str], have: Sequence[set[str]]) -> dict[str, Any]:
    """The source's data: ``names``, ``objects`` and ``states`` (pickled), ``models``, ``left``, ``error``."""
    missing = [name for name in names if name not in namespace]
    if missing:
        return {"error": NameError(f"rank {dist.get_rank()} has no variable {', '.join(missing)}")}
    lacking = {name for name in _users(namespace) if any(name not in some for some in have)}
    chosen = {
        name: value
        for name, value in (namespace.items() if not names else ((name, namespace[name]) for name in names))
        if names or (name in _users(namespace) and (name in lacking or _has_state(value)))
    }
    left = {} if not _why_not(chosen) else {name: why for name, value in chosen.items() if (why := _why_not(value))}
    if left and names:
        text = "; ".join(f"{name}: {why}" for name, why in left.items())
        return {"error": TypeError(f"these can't be copied to another rank: {text}")}
    chosen = {name: value for name, value in chosen.items() if name not in left}
    models: list[Any] = []
    objects = _dump(chosen, models)
    everybody_has = [set(chosen) <= some for some in have]
    states = {name: value.state_dict() if _has_state(value) else value for name, value in chosen.items()}
    return {
        "error": None,
        "names": list(chosen),
        "left": left,
        "objects": None if all(everybody_has) else objects,
        "states": _dump(states, []) if sum(everybody_has) > 1 else None,
        "stateful": [name for name, value in chosen.items() if _has_state(value)],
        "models": [_history(model) for model in models],
        "names_of_models": [_name_of(model, namespace) for model in models],
    }


def _why_not(value: Any) -> str:
    """Why a value can't be copied; "" if it can."""
    try:
        _dump(value, [])
    except Exception as error:  # noqa: BLE001  a user's __reduce__ may raise anything
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _history(model: Any) -> dict[str, Any]:
    """The state with which a copy of the model continues."""
    hooks = list(model._comm_hooks)
    if isinstance(model, DistributedDataParallel):
        return {"hooks": _dump(hooks, []), **_synchronizer(model).history()}
    return {"hooks": _dump(hooks, [])}


def _synchronizer(model: DistributedDataParallel) -> GradientSynchronizer:
    return next(one.sync for one in live_models() if one.sync.owner() is model)


def _name_of(model: Any, namespace: Mapping[str, Any]) -> str:
    return next((name for name, value in namespace.items() if value is model), "")


class _Pickler(Pickler):
    """See [Note: restoring]."""

    def __init__(self, buffer: io.BytesIO, models: list[Any]) -> None:
        super().__init__(buffer)
        self._models = models
        self._namespace = {"__name__": "__main__"}
        self._own_device = _own_device()
        self.globals_ref[id(_namespace())] = self._namespace

    def persistent_id(self, obj: Any) -> str | None:
        return _NAMESPACE if obj is self._namespace else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Models) and not any(obj is one for one in self._models):
            self._models.append(obj)
        elif isinstance(obj, DistributedSampler) and obj.rank == dist.get_rank():
            return _sampler_here, (type(obj), obj.__dict__)
        elif isinstance(obj, torch.device) and obj == self._own_device and obj.type != "cpu":
            return _own_device, ()
        elif type(obj) is torch.Tensor and obj.device == self._own_device and obj.device.type != "cpu":
            return _tensor_here, (obj.detach().cpu(), obj.requires_grad)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return _namespace()


def _dump(value: Any, models: list[Any]) -> bytes:
    """Pickles; puts the data-parallel models that are in it into `models`, and into the pickle, in this order."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a hook's state: its group is the receiver's
        _Pickler(buffer, models).dump((value, models))
    return buffer.getvalue()


def _load(data: bytes) -> tuple[Any, list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copy of a model has no comm hook: it gets its own here
        found: tuple[Any, list[Any]] = _Unpickler(io.BytesIO(data)).load()
    return found


def _own_device() -> torch.device:
    return torch.device(_namespace().get("device", "cpu"))


def _tensor_here(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.to(_own_device()).requires_grad_(requires_grad)


def _sampler_here(kind: type, state: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(state, rank=dist.get_rank())
    return made


# -- all ranks


def _take_all(namespace: dict[str, Any], offer: Mapping[str, Any]) -> list[Any]:
    """Sets all chosen variables; returns the models among them."""
    kept = dict(namespace)
    objects, models = _load(offer["objects"])
    namespace.update(kept)  # names that functions refer to are included; a rank's own names stay
    namespace.update(objects)
    return models


def _take_states(namespace: dict[str, Any], offer: Mapping[str, Any], *, named: bool) -> None:
    states = _load(offer["states"])[0]
    for name, state in states.items():
        if name in offer["stateful"]:
            namespace[name].load_state_dict(state)
        elif named:
            namespace[name] = state


def _find(namespace: dict[str, Any], history: Mapping[str, Any], name: str) -> Any:
    """This rank's model that is the source's: by number, for torch's class by the variable's name."""
    for model in live_models():
        if model.sync.model_id == history.get("reducer_id"):
            return model.sync.owner()
    found = namespace.get(name)
    if not isinstance(found, _Models):
        raise TypeError(f"the model {name or '(no variable of its own)'} of the source has no counterpart here")
    return found


def _go_on(model: Any, history: Mapping[str, Any]) -> None:
    """Gives the model a new reducer, on all ranks."""
    hooks = _load(history["hooks"])[0]
    if isinstance(model, DistributedDataParallel):
        _synchronizer(model).resume(history, hooks)
        return
    mine = list(model._comm_hooks) or hooks
    model.__setstate__({**model.__getstate__(), "_comm_hooks": []})
    for state_or_hook in mine:
        hook, state = state_or_hook
        model.register_comm_hook(state, hook)


def _namespace() -> dict[str, Any]:
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise RuntimeError("copy_state_from copies the variables of cells: call it in a %%distributed cell")
    found: dict[str, Any] = shell.user_ns
    return found


def _users(namespace: Mapping[str, Any]) -> set[str]:
    """Names that cells have given, without IPython's own and process groups."""
    from IPython import get_ipython

    hidden = get_ipython().user_ns_hidden
    return {
        name
        for name, value in namespace.items()
        if not name.startswith("_")
        and not (name in hidden and (hidden[name] is value or isinstance(value, (list, dict))))
        and not isinstance(value, (dist.ProcessGroup, dist.Work, types.FrameType))
    }
