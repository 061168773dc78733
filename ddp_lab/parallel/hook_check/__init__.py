"""`ddp_lab.check_hook`: tries a comm hook: contract, equal ranks, accuracy, bytes, times, training."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType

from ... import recording
from ...analysis.check_reports import BucketCheck, HookProblem, HookReport, TrainingCheck
from ...formatting import label_of
from ..core import comm_hooks, process_groups
from ..distributed import DistributedDataParallel
from . import training, verdict
from .cases import Case, cases, copy_of_state
from .trial import Trial

__all__ = ["check_hook"]

_used: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # exchanges of each group


def check_hook(
    hook: comm_hooks.Hook,
    state: object = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    model: nn.Module | None = None,
    loss: training.Loss | None = None,
    steps: int = 30,
    dtypes: Sequence[torch.dtype] | None = None,
    in_flight: int = 4,
    tolerance: float | None = None,
    expect_equal: bool = True,
    make_state: Callable[[], object] | None = None,
    timeout: float = 10.0,
) -> HookReport:
    """Tries a comm hook on random buckets and in training, and reports problems. All ranks must call it.

    It checks whether the hook can be called and returns a future of a valid tensor; whether all ranks get the same
    bits; how far they are from the exact mean; NaN, Inf and zeros; and several buckets at once. It measures the payload
    given to collectives and the times of encoding, communicating, decoding and copying, and compares a model's loss
    with that of plain averaging. Sparse gradients are not tried. The check takes some seconds, changes neither your
    state nor your model, and is not recorded.

    Args:
        hook: ``hook(state, bucket)``, or a `dist.BuiltinCommHookType`.
        state: the hook's first argument. Each trial uses a copy of its own.
        process_group: the ranks that call this; None for the default group. It is not passed to the hook, whose group
            is in its state or the default one.
        model: a module to train, instead of a small classifier; requires `loss`.
        loss: ``loss(model, step)`` returns the loss of this rank's batch of that step; `model` is the wrapped copy.
        steps: training steps; 0: none.
        dtypes: of gradients; the first is tried in all sizes. None: float32 (with `model`: its dtypes), and others that
            work.
        in_flight: buckets that are started before waiting for the first; 1 for hooks that allow only one.
        tolerance: largest accepted relative error (Euclidean); None: any.
        expect_equal: False for hooks after which ranks may differ until parameters are averaged (local SGD).
        make_state: creates a state for each trial, if states can't be copied.
        timeout: seconds allowed for one round of buckets, or one training step.

    Returns:
        The report, the same on all ranks.

    Raises:
        ValueError: only one of `model` and `loss` is given.
        RuntimeError: a rank did not make the call.

    Example:
        >>> print(ddp_lab.check_hook(my_hook, my_state))
    """
    if (model is None) != (loss is None):
        raise ValueError("check_hook: give model and loss together, or neither")
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("check_hook needs a process group: call torch.distributed.init_process_group() first")
    check = _Check(hook, state, group, model, loss, tolerance, expect_equal, make_state, timeout)
    with recording.suspended(), torch.random.fork_rng():
        check.run(steps, dtypes, in_flight)
    return check.report()


@dataclass
class _Check:
    _given: comm_hooks.Hook
    _state: object
    _group: dist.ProcessGroup
    _model: nn.Module | None
    _given_loss: training.Loss | None
    tolerance: float | None
    expect_equal: bool
    make_state: Callable[[], object] | None
    timeout: float

    def __post_init__(self) -> None:
        group, model, hook = self._group, self._model, self._given
        self._rank, self._ranks = group.rank(), group.size()
        self._name = str(hook) if isinstance(hook, BuiltinCommHookType) else comm_hooks.hook_name(hook)
        self._hook: Callable[..., Any] = hook  # type: ignore[assignment]
        parameter = next(model.parameters(), None) if model is not None else None
        self._device = parameter.device if parameter is not None else _device_of(group)
        self._module = model if model is not None else training.default_model().to(self._device)
        self._loss = self._given_loss or training.default_loss(self._rank, self._device)
        self._exchange = _Exchange(group)
        self._problems: list[HookProblem] = []
        self._buckets: list[BucketCheck] = []
        self._training: TrainingCheck | None = None
        self.notes: list[str] = []

    def run(self, steps: int, dtypes: Sequence[torch.dtype] | None, in_flight: int) -> None:
        """Runs all checks, as long as the hook can be called and leaves the group usable."""
        if not self.signature():
            return
        asked = list(dtypes) if dtypes else self.dtypes()
        healthy = all(self.try_buckets(case) for case in cases(asked, in_flight, others=dtypes is None))
        if steps > 0 and healthy:
            self.train(steps, several_buckets=in_flight > 1)
        elif steps > 0:
            self.notes.append("Training was skipped: collectives of the hook are unfinished.")

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the model's parameters, the most frequent first."""
        found = [p.dtype for p in self._module.parameters() if p.requires_grad and p.dtype.is_floating_point]
        return sorted(set(found), key=lambda dtype: (-found.count(dtype), str(dtype))) or [torch.float32]

    def signature(self) -> bool:
        """Whether the hook can be called."""
        if isinstance(self._given, BuiltinCommHookType):
            self._hook = _as_function(self._given, self._group, self._device)
        refused = _refusal(comm_hooks.check_signature, self._hook)
        answers = self._exchange.all([refused, _refusal(comm_hooks.check_backend, self._hook)], 60 + self.timeout)
        for which, remedy in enumerate(
            ("Give it two parameters: (state, bucket).", "Wrap it in a function of your own.")
        ):
            bad = [rank for rank, answer in enumerate(answers) if answer[which]]
            if bad:
                who, why = label_of(bad).capitalize(), answers[bad[0]][which]
                what = f"{who}: register_comm_hook() rejects it: {why}"
                self._problems.append(HookProblem("refused", what, remedy))
        return not any(answer[0] for answer in answers)

    def _fresh_state(self) -> object:
        if self.make_state is not None:
            return self.make_state()
        made, copied = copy_of_state(self._state)
        note = f"The state, a {type(self._state).__qualname__}, can't be copied: trials share it. Pass make_state."
        if not copied and note not in self.notes:
            self.notes.append(note)
        return made

    def try_buckets(self, case: Case) -> bool:
        """Tries one case on all ranks; returns whether the group is still usable."""
        trial = Trial(self._hook, self._fresh_state(), case, self._rank, self._device, self.timeout)
        trial.run()
        answers = self._exchange.all(verdict.measure(trial, self._ranks), 60 + 4 * self.timeout)
        self._problems += verdict.problems(case, answers, tolerance=self.tolerance, expect_equal=self.expect_equal)
        checked = verdict.bucket_check(case, answers)
        if checked is not None:
            self._buckets.append(checked)
        stuck = [one["broken"][0] for one in answers if one["broken"]]
        return not {"never completes", "never ends"} & set(stuck)

    def train(self, steps: int, *, several_buckets: bool) -> None:
        """Trains on all ranks."""
        mine = training.train(
            self._hook,
            self._fresh_state(),
            self._module,
            self._loss,
            group=self._group,
            steps=steps,
            several_buckets=several_buckets,
            seconds=max(self.timeout, 10.0),
        )
        answers = self._exchange.all(mine, 60 + 4 * max(self.timeout, 10.0))
        name = type(self._module).__name__
        self._training, found = training.judge(name, answers, expect_equal=self.expect_equal)
        self._problems += found

    def report(self) -> HookReport:
        """The report."""
        self.notes.append(
            "The payload given to collectives is measured; bytes on the wire are computed from it, for algorithms "
            "that send as little as possible (a ring), because no backend reports them."
        )
        if self._device.type != "cpu":
            self.notes.append("Times are the host's; a device may continue after a future is complete.")
        return HookReport(
            hook=self._name,
            ranks=self._ranks,
            backend=process_groups.backend_name(self._group),
            buckets=tuple(self._buckets),
            training=self._training,
            problems=verdict.merged(self._problems),
            notes=tuple(self.notes),
        )


def _refusal(check: Callable[[Any], None], hook: Any) -> str | None:
    try:
        check(hook)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _device_of(group: dist.ProcessGroup) -> torch.device:
    on_device = process_groups.backend_name(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")


def _as_function(kind: Any, group: dist.ProcessGroup, device: torch.device) -> Callable[..., Any]:
    """A built-in hook as a function: a small model's reducer runs it."""
    model = DistributedDataParallel(nn.Linear(1, 1, device=device), process_group=group)
    model._register_builtin_comm_hook(kind)

    def hook(state: object, bucket: Any) -> Any:
        return model.reducer._run_comm_hook(bucket)

    return hook


class _Exchange:
    """Exchanges small answers between the ranks of a group, through its store: works when its collectives do not.

    Every rank of the group creates one, and calls `all` the same number of times.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        number = _used.get(group, 0)
        _used[group] = number + 1
        self._store: Any = process_groups.needed_store_of(group)
        self._prefix = f"ddp_lab/exchange/{number}"
        self._ranks = group.size()
        self._rank = group.rank()
        self._turn = 0

    def all(self, answer: Any, seconds: float) -> list[Any]:
        """Every rank's answer, by rank in the group.

        Args:
            answer: JSON-able.
            seconds: how long to wait for the others.

        Raises:
            RuntimeError: a rank did not answer within `seconds`; the message names it.
        """
        turn, self._turn = self._turn, self._turn + 1
        self._store.set(self._key(turn, self._rank), json.dumps(answer))
        end = time.monotonic() + seconds
        found = [self._wait(turn, rank, end) for rank in range(self._ranks)]
        if turn:  # ranks that have answered now have read the previous answers
            self._store.delete_key(self._key(turn - 1, self._rank))
        return [json.loads(text) for text in found]

    def _key(self, turn: int, rank: int) -> str:
        return f"{self._prefix}/{turn}/{rank}"

    def _wait(self, turn: int, rank: int, end: float) -> bytes:
        key = self._key(turn, rank)
        left = max(0.1, end - time.monotonic())
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            if self._store.check([key]):
                return bytes(self._store.get(key))
            raise RuntimeError(
                f"timed out waiting for rank {rank} of the group: check that it is alive and makes this call too"
            ) from error
        return bytes(self._store.get(key))
