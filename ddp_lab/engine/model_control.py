"""Control messages about training models: changes, faults, pauses. Answered while a cell runs.

Each is a command of `ddp_lab.protocol.commands` as JSON, with ``"op": "live"`` and, if it is about one model,
``"reducers": {rank: this rank's number of the model}``; what they do is in `ddp_lab.parallel.live.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..parallel.live import breakpoints, change, injected
from ..parallel.live.model import LiveModel, live_models
from ..parallel.monitoring.inspection import is_observed
from ..protocol import commands
from .telemetry import Telemetry


def install(channel: Telemetry) -> None:
    """Answers the client's messages on this channel; called once in the life of a rank."""
    channel.on_control("live", lambda message: answer(channel.rank, message))
    injected.before_death.append(channel.stop)  # which waits until recorded events are sent


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
    if model is None:  # not an internal error: a view may ask for a model that a cell has just replaced
        return {"error": _why_not(number)}
    return _ONE_MODEL[type(command)](model, command)


def _why_not(number: int) -> str:
    if is_observed(number):
        return f"its model {number} has torch's class and is only observed: wrap it in ddp_lab.DistributedDataParallel"
    return f"its model {number} no longer exists: no variable of a cell refers to it"


def _model(reducer: int) -> LiveModel | None:
    return next((model for model in live_models() if model.sync.model_id == reducer), None)


def _faults(asked: commands.TellFaults) -> dict[str, Any]:
    return {"faults": [fault for model in live_models() for fault in model.faults()]}


def _clear_faults(asked: commands.ClearFaults) -> None:
    for model in live_models():
        model.end_faults(asked.number)


def _resume(asked: commands.Resume) -> None:
    for model in live_models():
        model.breakpoints.clear()
    breakpoints.restore_timeouts()


_ONE_MODEL: dict[type, Callable[[LiveModel, Any], Mapping[str, Any] | None]] = {
    commands.CheckChange: lambda model, asked: change.check(model.sync, asked.change),
    commands.PrepareChange: lambda model, asked: model.prepare(asked.name, asked.change),
    commands.TellChange: lambda model, asked: model.status(asked.name),
    commands.WithdrawChange: lambda model, asked: {"withdrawn": model.withdraw(asked.name)},
    commands.PrepareLook: lambda model, asked: model.prepare_look(asked.name, asked.look),
    commands.TellLooks: lambda model, asked: model.monitoring(),
    commands.InjectFault: lambda model, asked: {"number": model.inject(asked.fault)},
    commands.SetBreakpoints: lambda model, asked: model.breakpoints.set(asked.points, asked.parameters, asked.buckets),
    commands.GoOn: lambda model, asked: {"was_paused": model.breakpoints.go_on(asked.until)},
    commands.TellStage: lambda model, asked: model.breakpoints.stage(),
}
_ALL_MODELS: dict[type, Callable[[Any], Mapping[str, Any] | None]] = {
    commands.TellFaults: _faults,
    commands.ClearFaults: _clear_faults,
    commands.HoldTimeouts: lambda asked: breakpoints.hold_timeouts(),
    commands.Resume: _resume,
}
