"""Control messages about models that train: changes, faults, pauses. Answered while a cell runs.

Each is ``{"op": "live", "do": ..., "reducers": {rank: this rank's number of the model}, ...}``; what they do is in
`ddp_lab.parallel.live`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from .. import faults
from ..parallel.live import breakpoints, fault_injection, rehearsal, requests
from ..parallel.live.change import Change, check
from ..parallel.monitoring import monitors
from ..parallel.monitoring.inspection import is_observed, live_models

if TYPE_CHECKING:
    from ..parallel.core.model_state import ModelState

__all__ = ["answer", "install"]

_Message = Mapping[str, Any]


class _Channel(Protocol):
    rank: int

    def on_control(self, op: str, handler: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> None: ...
    def stop(self) -> None: ...


def install(channel: _Channel) -> None:
    """Answers the client's messages on this channel; called once in the life of a rank."""
    channel.on_control("live", lambda message: answer(channel.rank, message))
    fault_injection.before_death.append(channel.stop)  # which waits until what was recorded has left


def answer(rank: int, message: _Message) -> Mapping[str, Any] | None:
    """Carries out one message and returns the reply."""
    do = message["do"]
    if do in _ALL_MODELS:
        return _ALL_MODELS[do](message)
    number = message["reducers"].get(str(rank))
    if number is None:
        return {"error": "it has no such model"}
    model = _model(number)
    if model is None:  # no failure of ours: a view may ask for a model that a cell has just replaced
        return {"error": _why_not(number)}
    return _ONE_MODEL[do](model, message)


def _why_not(number: int) -> str:
    if is_observed(number):
        return f"its model {number} is of torch's class, and only observed: wrap it in ddp_lab.DistributedDataParallel"
    return f"its model {number} is gone: no variable of a cell holds it any more"


def _model(reducer: int) -> ModelState | None:
    return next((model for model in live_models() if model.reducer_id == reducer), None)


def _check(model: ModelState, message: _Message) -> None:
    check(model, Change(**message["change"]))


def _prepare(model: ModelState, message: _Message) -> None:
    decides = model.process_group.rank() == 0
    requests.prepare(model, message["name"], Change(**message["change"]), decides=decides)


def _look(model: ModelState, message: _Message) -> None:
    decides = model.process_group.rank() == 0
    requests.prepare_look(model, message["name"], monitors.Look(**message["look"]), decides=decides)


def _looks(model: ModelState, message: _Message) -> dict[str, Any]:
    return monitors.status(model)


def _withdraw(model: ModelState, message: _Message) -> dict[str, Any]:
    return {"withdrawn": requests.withdraw(model, message["name"])}


def _status(model: ModelState, message: _Message) -> dict[str, Any]:
    return requests.status(model, message["name"])


def _inject(model: ModelState, message: _Message) -> dict[str, Any]:
    return {"number": rehearsal.inject(model, faults.from_dict(message["fault"]))}


def _set_breakpoints(model: ModelState, message: _Message) -> None:
    breakpoints.set_breakpoints(model, message["points"], message["parameters"], message["buckets"])


def _go_on(model: ModelState, message: _Message) -> dict[str, Any]:
    return {"was_paused": breakpoints.go_on(model, message["until"])}


def _stage(model: ModelState, message: _Message) -> dict[str, Any]:
    return breakpoints.stage(model)


def _faults(message: _Message) -> dict[str, Any]:
    return {"faults": [fault for model in live_models() for fault in rehearsal.active(model)]}


def _clear_faults(message: _Message) -> None:
    for model in live_models():
        rehearsal.end(model, message.get("number"))


def _hold(message: _Message) -> None:
    breakpoints.hold_timeouts()


def _resume(message: _Message) -> None:
    """Breakpoints of all models are taken away, and pauses end."""
    for model in live_models():
        breakpoints.clear(model)
    breakpoints.restore_timeouts()


_ONE_MODEL: dict[str, Callable[[ModelState, _Message], Mapping[str, Any] | None]] = {
    "check": _check,
    "prepare": _prepare,
    "look": _look,
    "looks": _looks,
    "withdraw": _withdraw,
    "status": _status,
    "inject": _inject,
    "breakpoints": _set_breakpoints,
    "go on": _go_on,
    "stage": _stage,
}
_ALL_MODELS: dict[str, Callable[[_Message], Mapping[str, Any] | None]] = {
    "faults": _faults,
    "clear faults": _clear_faults,
    "hold": _hold,
    "resume": _resume,
}
