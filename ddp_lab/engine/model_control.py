"""Control messages about models that train: changes, faults, pauses. Answered while a cell runs.

Each is a command of `ddp_lab.protocol.commands` as JSON, with ``"op": "live"`` and, if it is about one model,
``"reducers": {rank: this rank's number of the model}``; what they do is in `ddp_lab.parallel.live`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..parallel.live import breakpoints, fault_injection, rehearsal, requests
from ..parallel.live.change import check
from ..parallel.monitoring import monitors
from ..parallel.monitoring.inspection import is_observed, live_models
from ..protocol import commands

if TYPE_CHECKING:
    from ..parallel.core.model_state import ModelState

__all__ = ["answer", "install"]


class _Channel(Protocol):
    rank: int

    def on_control(self, op: str, handler: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> None: ...
    def stop(self) -> None: ...


def install(channel: _Channel) -> None:
    """Answers the client's messages on this channel; called once in the life of a rank."""
    channel.on_control("live", lambda message: answer(channel.rank, message))
    fault_injection.before_death.append(channel.stop)  # which waits until what was recorded has left


def answer(rank: int, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Carries out one command and returns the reply."""
    command = commands.from_json(message)
    of_all = _ALL_MODELS.get(type(command))
    if of_all is not None:
        return of_all(command)
    number = message["reducers"].get(str(rank))
    if number is None:
        return {"error": "it has no such model"}
    model = _model(number)
    if model is None:  # no failure of ours: a view may ask for a model that a cell has just replaced
        return {"error": _why_not(number)}
    return _ONE_MODEL[type(command)](model, command)


def _why_not(number: int) -> str:
    if is_observed(number):
        return f"its model {number} is of torch's class, and only observed: wrap it in ddp_lab.DistributedDataParallel"
    return f"its model {number} is gone: no variable of a cell holds it any more"


def _model(reducer: int) -> ModelState | None:
    return next((model for model in live_models() if model.reducer_id == reducer), None)


def _decides(model: ModelState) -> bool:
    return bool(model.process_group.rank() == 0)


def _prepare(model: ModelState, asked: commands.PrepareChange) -> None:
    requests.prepare(model, asked.name, asked.change, decides=_decides(model))


def _look(model: ModelState, asked: commands.PrepareLook) -> None:
    requests.prepare_look(model, asked.name, asked.look, decides=_decides(model))


def _set_breakpoints(model: ModelState, asked: commands.SetBreakpoints) -> None:
    breakpoints.set_breakpoints(model, asked.points, asked.parameters, asked.buckets)


def _faults(asked: commands.TellFaults) -> dict[str, Any]:
    return {"faults": [fault for model in live_models() for fault in rehearsal.active(model)]}


def _clear_faults(asked: commands.ClearFaults) -> None:
    for model in live_models():
        rehearsal.end(model, asked.number)


def _resume(asked: commands.Resume) -> None:
    for model in live_models():
        breakpoints.clear(model)
    breakpoints.restore_timeouts()


_ONE_MODEL: dict[type, Callable[[ModelState, Any], Mapping[str, Any] | None]] = {
    commands.CheckChange: lambda model, asked: check(model, asked.change),
    commands.PrepareChange: _prepare,
    commands.TellChange: lambda model, asked: requests.status(model, asked.name),
    commands.WithdrawChange: lambda model, asked: {"withdrawn": requests.withdraw(model, asked.name)},
    commands.PrepareLook: _look,
    commands.TellLooks: lambda model, asked: monitors.status(model),
    commands.InjectFault: lambda model, asked: {"number": rehearsal.inject(model, asked.fault)},
    commands.SetBreakpoints: _set_breakpoints,
    commands.GoOn: lambda model, asked: {"was_paused": breakpoints.go_on(model, asked.until)},
    commands.TellStage: lambda model, asked: breakpoints.stage(model),
}
_ALL_MODELS: dict[type, Callable[[Any], Mapping[str, Any] | None]] = {
    commands.TellFaults: _faults,
    commands.ClearFaults: _clear_faults,
    commands.HoldTimeouts: lambda asked: breakpoints.hold_timeouts(),
    commands.Resume: _resume,
}
