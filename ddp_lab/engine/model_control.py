"""Control messages about training models: changes, faults, pauses. Answered while a cell runs.

Those about one model are each a `ModelRequest`; what they do is in `ddp_lab.parallel.live.model`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..parallel.live import breakpoints, change, injected
from ..parallel.live.model import LiveModel, live_models
from ..parallel.monitoring.inspection import is_observed
from ..protocol import messages
from ..protocol.messages import ModelRequest, Refused
from .telemetry import Telemetry


def install(channel: Telemetry) -> None:
    """Answers the client's messages on this channel; called once in the life of a rank."""
    for about_one in _ONE_MODEL:
        channel.on_control(about_one, lambda request: answer(channel.rank, request))
    for about_all, carry_out in _ALL_MODELS.items():
        channel.on_control(about_all, carry_out)
    injected.before_death.append(channel.stop)  # which waits until recorded events are sent


def answer(rank: int, request: ModelRequest[Any]) -> object:
    """Carries out a request about one model and returns the reply."""
    number = request.reducers.get(rank)
    if number is None:
        raise Refused("it has no such model")
    model = _model(number)
    if model is None:  # not an internal error: a view may ask for a model that a cell has just replaced
        raise Refused(_why_not(number))
    return _ONE_MODEL[type(request)](model, request)


def _why_not(number: int) -> str:
    if is_observed(number):
        return f"its model {number} has torch's class and is only observed: wrap it in ddp_lab.DistributedDataParallel"
    return f"its model {number} no longer exists: no variable of a cell refers to it"


def _model(reducer: int) -> LiveModel | None:
    return next((model for model in live_models() if model.sync.model_id == reducer), None)


def _faults(asked: messages.GetFaults) -> messages.Faults:
    return messages.Faults([fault for model in live_models() for fault in model.faults()])


def _clear_faults(asked: messages.ClearFaults) -> None:
    for model in live_models():
        model.end_faults(asked.number)


def _resume(asked: messages.Resume) -> None:
    for model in live_models():
        model.breakpoints.clear()
    breakpoints.restore_timeouts()


_ONE_MODEL: dict[type[ModelRequest[Any]], Callable[[LiveModel, Any], object]] = {
    messages.CheckChange: lambda model, asked: change.check(model.sync, asked.change),
    messages.PrepareChange: lambda model, asked: model.prepare(asked.name, asked.change),
    messages.GetChange: lambda model, asked: model.status(asked.name),
    messages.WithdrawChange: lambda model, asked: messages.Withdrawal(model.withdraw(asked.name)),
    messages.PrepareMonitoring: lambda model, asked: model.prepare_look(asked.name, asked.monitoring),
    messages.GetMonitoring: lambda model, asked: model.monitoring(),
    messages.InjectFault: lambda model, asked: messages.FaultNumber(model.inject(asked.fault)),
    messages.SetBreakpoints: lambda model, asked: model.breakpoints.set(asked.points, asked.parameters, asked.buckets),
    messages.Continue: lambda model, asked: model.breakpoints.go_on(asked.until),
    messages.GetStage: lambda model, asked: model.breakpoints.stage(),
}
_ALL_MODELS: dict[type[messages.Request[Any]], Callable[[Any], object]] = {
    messages.GetFaults: _faults,
    messages.ClearFaults: _clear_faults,
    messages.HoldTimeouts: lambda asked: breakpoints.hold_timeouts(),
    messages.Resume: _resume,
}
