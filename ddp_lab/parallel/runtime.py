"""What a `DistributedDataParallel` trains with: all that is made again for a copy of the model, and its forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs

from .core import adaptation, arguments, step_check
from .core.arguments import Arguments
from .core.comm_hooks import check_hook, warn_if_late
from .core.outputs import find_tensors
from .core.synchronizer import GradientSynchronizer, Settings
from .features import compile as compiling
from .features import join, optimizer_in_backward
from .features.delayed import DelayedParameters
from .features.logging_data import DDPLogger
from .features.mixed_precision import LowPrecision
from .live.model import LiveModel
from .monitoring import activity, inspection
from .monitoring.monitors import Monitors

__all__ = ["Runtime"]


class Runtime:
    """The parts of one model that average its gradients, and those that monitor and change that.

    Making them communicates nothing.

    Args:
        model: the wrapper, with its attributes `module` and `parameters_to_ignore`.
        group: the ranks that train together.
        settings: how gradients are averaged.
        delayed: the parameters that are averaged late, by name.

    Attributes:
        sync: averages the gradients.
        monitors, live: monitor that, and change it.
        precision: with mixed precision.
        late: averages the delayed parameters.
        all_late: whether it averages all: then there is no reducer.
        logger: the logging data, a `DDPLogger`; None until the reducer exists.
    """

    def __init__(
        self,
        model: Any,
        group: dist.ProcessGroup,
        settings: Settings,
        delayed: dict[str, torch.nn.Parameter],
    ) -> None:
        late = list(delayed.values())
        self.sync = GradientSynchronizer(
            model.module, model.parameters_to_ignore, group, owner=model, settings=settings, delayed=late
        )
        self.monitors = Monitors(self.sync)
        self.live = LiveModel(self.sync, self.monitors)
        self.logger: Any = None
        self.precision: LowPrecision | None = None
        self.late: DelayedParameters | None = None
        self.all_late = bool(delayed) and not self.sync.survey.trained
        self._delayed = delayed
        self._device: torch.device | None = None
        self._side_stream = False
        self._has_run = False

    def agree(self, model: Any, given: Arguments) -> None:
        """The ranks compare their models, receive rank 0's state, and are ready to train."""
        sync, delayed = self.sync, self._delayed
        if given.param_to_hook_all_reduce is not None:
            trigger, size = given.param_to_hook_all_reduce, arguments.BROADCAST_BYTES
            self.late = DelayedParameters(list(delayed.values()), list(delayed), trigger, sync.group, size)
        if self.all_late:
            return
        sync.agree(collective=given.init_sync)
        if given.init_sync:
            sync.broadcast_state(with_buffers=given.sends_buffers)
        if sync.options.static_graph:
            arguments.warn_static(sync.options.find_unused_parameters)
        self.start(model)

    def start(self, model: Any) -> None:
        """Makes the reducer and the parts that need it; the ranks have agreed on the model."""
        activity.install(model)
        sync = self.sync
        sync.on_new_reducer += [inspection.install, optimizer_in_backward.attach_reducer]
        if sync.options.mixed_precision is not None:
            self.precision = LowPrecision(sync)
        sync.build()
        self.live.enlist()
        step_check.watch(sync)
        if model.device_ids:
            self._device = torch.device(sync.device.type, model.device_ids[0])
        self._side_stream = model.use_side_stream_for_tensor_copies
        self.logger = DDPLogger(
            sync,
            is_multi_device_module=int(model.is_multi_device_module),
            device_ids=", ".join(map(str, model.device_ids or ())),
            output_device=-1 if model.output_device is None else model.output_device,
        )
        if sync.in_python:
            self._python_hooks = compiling.install_python_reducer(model, sync)

    # -- forwards: their names are torch's, by which the diagnosis of a hang knows them

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        sync = self.sync
        if not self._has_run:
            self._has_run = True
            optimizer_in_backward.install(sync)
        if self.monitors.drift is not None:
            self.monitors.drift.before_forward(sync)
        if sync.inputs.uneven:
            join.before_forward(self._joinable(), sync)
        if torch.is_grad_enabled():
            self._prepare(sync, sync.wanted)
        if sync.buffers.due_before():
            sync.synchronize_buffers()
        if self._device is not None:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, self._device, self._side_stream)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.precision is not None:
            inputs, kwargs = self.precision.before_forward(inputs, kwargs)
        return inputs, kwargs

    def _joinable(self) -> Joinable:
        model = self.sync.owner()
        assert isinstance(model, Joinable), "it runs this forward"
        return model

    def _prepare(self, sync: GradientSynchronizer, synchronised: bool) -> None:
        """All steps of the reducer before the module runs."""
        if synchronised:
            if not adaptation.unchanged(sync):
                adaptation.adapt(sync)
            if not sync.step_agreed:
                self.live.settle()
            self.logger.begin_iteration()
        if self.live.waiting:
            self.live.before_forward(synchronised)
        if sync.reducer.begin_forward(synchronised):
            sync.rebuild()
            sync.reducer.begin_forward(synchronised)
        elif synchronised and sync.follower is not None:
            sync.rebuild_if_due(synchronised)

    def _post_forward(self, output: Any) -> Any:
        sync = self.sync
        if sync.buffers.due_after():
            sync.synchronize_buffers()
        synchronised = False
        if torch.is_grad_enabled():
            synchronised = sync.wanted
            sync.reducer.end_forward()
            if not (sync.is_sharded or self.precision is not None):  # these replace the parameters' data themselves
                sync.reducer.follow_accumulators()
                if synchronised and not adaptation.unchanged(sync):
                    adaptation.warn_of_forward(sync)
            sync.reducer.arm(find_tensors(output), synchronised)
            if synchronised:
                sync.note_forward()
        sync.buffers.wanted = synchronised
        if self.precision is not None:
            self.precision.after_forward(find_tensors(output))
        return self.expect_late(output)

    def expect_late(self, output: Any) -> Any:
        """Prepares the delayed parameters for the backward of this output, which it returns."""
        if self.late is not None:
            self.late.before_backward(self.sync.wanted)
        return output

    # -- when gradients are averaged

    def set_wanted(self, wanted: bool) -> None:
        """Whether the next backwards are averaged."""
        self.sync.wanted = wanted
        if self.all_late:
            return
        self.sync.reducer.set_no_sync(not wanted)
        if self.sync.reducer.take_no_sync_warning():
            warnings.warn(
                "A backward ran inside no_sync(), but its forward did not: its gradients were averaged over the ranks. "
                "Put the forward inside no_sync() too.",
                stacklevel=3,
            )

    def synchronize(self) -> None:
        """See `DistributedDataParallel.sync_gradients`."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("sync_gradients() was called during a backward: call it after backward() has returned")
        if not adaptation.unchanged(self.sync):
            adaptation.adapt(self.sync)
        self.live.look()
        self.sync.reducer.synchronize()

    def check_finalized(self) -> None:
        """Raises RuntimeError if a backward has begun and not averaged all gradients."""
        with self.logged():
            self.sync.reducer.check_ended()
        if self.sync.reducer.in_flight():
            self.fail(
                RuntimeError,
                "Expected to finish all reduction: a backward has begun and some buckets are not reduced",
            )

    # -- backwards that the caller ends: [Note: a backward that the caller ends] in C++

    def require_manual_end(self, required: bool) -> None:
        """See `DistributedDataParallel.require_manual_backward_finalization`."""
        if required:
            self.check_manual_end()
        if self.all_late:
            return
        with self.logged():
            self.sync.reducer._set_manual_finalization_required(bool(required))
        self.sync.manual_end = bool(required)

    def must_end_after_backward(self) -> bool:
        """See `DistributedDataParallel.should_finalize_after_backward`."""
        if not self.sync.manual_end:
            return False
        return self.precision is not None or bool(self.sync.reducer._should_finalize_after_backward())

    def end_backward(self) -> None:
        """See `DistributedDataParallel.finalize_backward`."""
        self.check_manual_end()
        with self.logged():
            self.sync.reducer._finalize_backward_manual()
        if self.precision is not None:
            self.precision.restore()

    def check_manual_end(self) -> None:
        """Raises RuntimeError if the caller can't end the backwards of this model."""
        if self.all_late:
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params: leave some to the reducer, or keep it False."
            )
        if self.sync.in_python:
            raise RuntimeError(
                "Manual backward finalization is not supported with the Python reducer, in which the compiler "
                'reduces gradients: see torch._dynamo.config.optimize_ddp, which is "python_reducer".'
            )

    # -- settings of a model that exists

    def attach_hook(self, hook: Callable[..., Any], state: object) -> None:
        """See `DistributedDataParallel.register_comm_hook`."""
        with self.logged():
            check_hook(hook)
            warn_if_late(hook, self.sync.reducer.step())
            self.sync.attach_hook(hook, state)
        self.sync.describe()

    def attach_builtin_hook(self, comm_hook_type: Any) -> None:
        """Averages with a hook of `dist.BuiltinCommHookType`, in C++ and without the GIL."""
        with self.logged():
            self.sync.attach_hook(comm_hook_type, None)
        self.sync.describe()

    def set_static_graph(self) -> None:
        """Same as the argument `static_graph=True`; before the first forward.

        Raises:
            RuntimeError: training has begun.
        """
        if self.sync.options.static_graph:
            arguments.warn_user("You've set static_graph to be True, no need to set it again.")
            return
        with self.logged():
            self.sync.learn_graph()
        self.logger._set_static_graph()
        arguments.warn_static(self.sync.options.find_unused_parameters)

    def set_sample_rate(self, sample_rate: int) -> None:
        """Samples logging data every `sample_rate` iterations after the first ten.

        Raises:
            ValueError: `sample_rate` is below 1.
        """
        if sample_rate < 1:
            self.fail(
                ValueError, f"DDP runtime logging sample rate should be equal or greater than 1, got {sample_rate}"
            )
        self.logger.set_sample_rate(sample_rate)

    def check_copyable(self) -> None:
        """Raises RuntimeError if a copy could not train as this model does."""
        if self.late is not None:
            self.fail(
                RuntimeError,
                "A model with delay_all_reduce_named_params can't be copied: copy `.module` and wrap the copy.",
            )
        if self.sync.group is not dist.group.WORLD:
            self.fail(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP "
                "constructor; for other groups copy `.module` and wrap the copy.",
            )

    # -- errors

    def fail(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        """Raises, and stores the text in the logging data."""
        self._log(err_type, err_msg)
        raise err_type(err_msg)

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Stores the text of an exception in the logging data."""
        try:
            yield
        except Exception as error:
            self._log(type(error), error)
            raise

    def _log(self, kind: type[Exception], text: object) -> None:
        if self.logger is not None:
            self.logger.set_error_and_log(f"{kind}: {text}")
