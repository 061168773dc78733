"""The client's commands for training models: one frozen record for each, sent as JSON.

The ranks' side is `ddp_lab.engine.model_control`, the client's `ddp_lab.control.training`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..faults import Fault
from ..faults import from_dict as fault_from_dict
from ..faults import to_dict as fault_to_dict


@dataclass(frozen=True)
class Change:
    """The requested change. None: unchanged.

    Attributes:
        bucket_cap_mb: size limit of all buckets in MiB; of all but the first if `first_bucket_mb` is given.
        first_bucket_mb: size limit of the bucket that is launched first.
        bucket_cap_mb_list: size limits in the order of launch, the last one repeats; excludes the other two.
        order: ``"ready"`` (as rank 0's gradients became ready last), ``"registration"``, ``"reversed"``, or the names
            of all trained parameters.
        comm_hook: a name, see `ddp_lab.parallel.live.change`; ``"none"`` for the plain average.
    """

    bucket_cap_mb: float | None = None
    first_bucket_mb: float | None = None
    bucket_cap_mb_list: Sequence[float] | None = None
    order: str | Sequence[str] | None = None
    comm_hook: str | None = None

    def text(self) -> str:
        """JSON, the same for equal changes."""
        return json.dumps(asdict(self), sort_keys=True)

    def words(self) -> str:
        """For a mark on the timeline."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if not isinstance(given.get("order", ""), str):
            given["order"] = "as given"
        return "reconfigured: " + ", ".join(f"{name}={value}" for name, value in given.items())


@dataclass(frozen=True)
class Look:
    """The requested monitoring. None: unchanged; 0: off.

    Attributes:
        gradients: monitor the gradients at this interval of steps.
        drift: compare the replicas at this interval of steps.
        check: compare them once.
    """

    gradients: int | None = None
    drift: int | None = None
    check: bool = False

    def validate(self) -> None:
        """Raises `ValueError` if it is invalid."""
        for every in (self.gradients, self.drift):
            if every is not None and every < 0:
                raise ValueError(f"every must be at least 0 (0: off), got {every}")


@dataclass(frozen=True)
class Command:
    """One of the following."""


@dataclass(frozen=True)
class CheckChange(Command):
    """Check whether the model can be changed so: an error if not."""

    change: Change


@dataclass(frozen=True)
class PrepareChange(Command):
    """Change the model between two steps that rank 0 of its group decides; `name` identifies the request."""

    name: str
    change: Change


@dataclass(frozen=True)
class TellChange(Command):
    """Return the state of that change."""

    name: str


@dataclass(frozen=True)
class WithdrawChange(Command):
    """Withdraw the change, unless it is decided."""

    name: str


@dataclass(frozen=True)
class PrepareLook(Command):
    """Monitor values from a step on that rank 0 of the model's group decides."""

    name: str
    look: Look


class TellLooks(Command):
    """Return the active monitoring."""


@dataclass(frozen=True)
class InjectFault(Command):
    """Inject a fault from the next forward on."""

    fault: Fault


@dataclass(frozen=True)
class SetBreakpoints(Command):
    """Pause the model's backwards at these points; see `TrainingControl.breakpoints`."""

    points: Sequence[str]
    parameters: Sequence[str]
    buckets: Sequence[int]


@dataclass(frozen=True)
class GoOn(Command):
    """End a pause, `until` the next "breakpoint", "event" or "bucket"."""

    until: str


class TellStage(Command):
    """Return the state of the model's backward."""


class TellFaults(Command):
    """Return the faults of all models of the rank."""


@dataclass(frozen=True)
class ClearFaults(Command):
    """End the fault of this number, or for None all of the rank."""

    number: int | None = None


class HoldTimeouts(Command):
    """Keep group timeouts from expiring while a rank is paused."""


class Resume(Command):
    """Remove all breakpoints of the rank and continue training."""


_KINDS: dict[str, type[Command]] = {kind.__name__: kind for kind in Command.__subclasses__()}


def to_json(command: Command) -> dict[str, Any]:
    """The command, JSON-able: its name as ``do``, and its fields."""
    fields = asdict(command)
    if isinstance(command, InjectFault):
        fields["fault"] = fault_to_dict(command.fault)
    return {"do": type(command).__name__, **fields}


def from_json(message: Mapping[str, Any]) -> Command:
    """The inverse of `to_json`; other entries of the message are ignored.

    Raises:
        ValueError: there is no such command, or a field is missing or invalid.
    """
    kind = _KINDS.get(message.get("do", ""))
    if kind is None:
        raise ValueError(f"there is no command {message.get('do')!r}: choose one of {', '.join(_KINDS)}")
    names = kind.__dataclass_fields__
    missing = [name for name in names if name not in message]
    if missing:
        raise ValueError(f"the command {kind.__name__} lacks {', '.join(missing)}")
    fields = {name: message[name] for name in names}
    try:
        if "change" in fields:
            fields["change"] = Change(**fields["change"])
        if "look" in fields:
            fields["look"] = Look(**fields["look"])
        if "fault" in fields:
            fields["fault"] = fault_from_dict(fields["fault"])
    except TypeError as error:
        raise ValueError(f"the command {kind.__name__}: {error}") from None
    return kind(**fields)
