"""Building a model's reducer, and building it anew when the model has changed or was copied."""

from __future__ import annotations

import functools

import torch

from ... import native, recording
from ...bucketing import assign_buckets
from ..features import mixed_precision, optimizer_in_backward, python_reducer
from ..features.logging_data import DDPLogger
from ..monitoring import inspection, watching
from . import agreement, arguments, buckets, comm_hooks, parameters
from .messages import module_text
from .model_state import ModelState

__all__ = ["Construction"]

_C = native.load()


class Construction(ModelState):
    """The part of `DistributedDataParallel` that its constructor runs."""

    def _choose_parameters(self, survey: parameters.Survey) -> None:
        """Finds out which parameters there are, and on which devices."""
        self._module_parameters = list(survey.parameters.values())
        self._keep_buffers(survey.buffers)
        self._delay_all_reduce_all_params = not survey.trained and bool(self._delay_all_reduce_params)
        arguments.check_module(self.module, survey)
        tensors = self._module_parameters or self._delay_all_reduce_params
        if not tensors:
            raise RuntimeError(arguments.nothing_to_train(self.module))
        self.device = tensors[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in tensors}) > 1

    def _set_attributes(self, options: arguments.Options) -> None:
        """What the arguments say, by the names of torch's attributes."""
        tensors = self._module_parameters or self._delay_all_reduce_params
        self.device_ids, self.output_device = arguments.resolve_devices(options, tensors)
        self.dim = options.dim
        self.forward_sync_buffers = arguments.buffer_sync(options)[0]
        self.static_graph = options.static_graph
        self.find_unused_parameters = options.find_unused_parameters
        self.gradient_as_bucket_view = options.gradient_as_bucket_view
        self.skip_all_reduce_unused_params = options.skip_all_reduce_unused_params
        self.batched_grad_copy = options.batched_grad_copy
        self.lazy_bucket_allocation = options.lazy_bucket_allocation
        self.mixed_precision = options.mixed_precision
        mesh = options.device_mesh
        self._is_sharded = mesh is not None and mesh._get_root_mesh() != mesh
        self._caps = arguments.BucketCaps.of(options)
        self.bucket_bytes_cap = self._caps.others
        self.bucket_bytes_cap_list = list(self._caps.each)
        self.bucket_bytes_cap_default = self._caps.first < self._caps.others
        self.broadcast_bucket_size = 250 * arguments.MEBIBYTE
        self.use_side_stream_for_tensor_copies = arguments.use_side_stream()
        self._require_manual_backward_finalization = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._use_python_reducer = python_reducer.is_chosen()
        self._lazy_init_ran = False
        self._ddp_sink_clone = False
        self._delayed = None
        self._order_follower = None
        self._live = self._reconfigured = None
        self._comm_hooks = []

    def _agree(self, survey: parameters.Survey, *, collective: bool) -> int:
        """Checks that all ranks have the same model; the number that they give to its reducer."""
        options = {
            "bucket_cap_mb": [cap / arguments.MEBIBYTE for cap in self._caps.rebuilt()],
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
        }
        buffers = self.named_module_buffers if self.forward_sync_buffers else {}
        entries = agreement.model_description(survey.parameters.items(), buffers.items(), options) if collective else []
        return agreement.agree(entries, self.process_group, self.device, collective=collective)

    def _broadcast_state(self, survey: parameters.Survey, with_buffers: bool) -> None:
        """Makes all that is not ignored rank 0's, also frozen parameters."""
        tensors = [*survey.parameters.values(), *(survey.buffers.values() if with_buffers else ())]
        if tensors:
            self._distributed_broadcast_coalesced([tensor.detach() for tensor in tensors], self.broadcast_bucket_size)

    def _make_reducer(self, survey: parameters.Survey, *, generation: int = 0, step: int = 0) -> None:
        self._survey = survey
        self._seen = survey.seen
        self._idle_seen = None
        self._names = [name for name in survey.parameters if name in survey.trained]
        self._trained = [survey.parameters[name] for name in self._names]
        self._sizes = [p.numel() * p.element_size() for p in self._trained]
        self._keys = [(p.dtype, p.device) for p in self._trained]
        self._sparse = [name in survey.sparse for name in self._names]
        self._step_agreed = True
        self._has_rebuilt_buckets = False
        self._assignment = self._first_assignment()
        self.reducer = _C.Reducer(
            parameters=self._trained,
            names=self._names,
            assignment=self._assignment,
            process_group=self.process_group,
            reducer_id=self.reducer_id,
            process_group_index=agreement.process_group_index(self.process_group),
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            batched_grad_copy=self.batched_grad_copy,
            lazy_bucket_allocation=self.lazy_bucket_allocation,
            expect_sparse=self._sparse,
            module=module_text(self.module),
        )
        self.reducer.set_generation(generation)
        self.reducer.set_step(step)
        self.reducer._set_manual_finalization_required(self._require_manual_backward_finalization)
        if self.reducer.sums_pieces():
            _learn_references()
        inspection.install(self)
        watching.follow(self)
        self._describe_assignment()

    def _first_assignment(self) -> list[list[int]]:
        find_unused = self.find_unused_parameters and not self.static_graph
        return assign_buckets(self._sizes, self._keys, self._caps.initial(find_unused=find_unused), alone=self._sparse)

    def _renew_reducer(self, survey: parameters.Survey) -> None:
        """Puts a reducer for what `survey` found in the place of the old one; all ranks."""
        old = self.reducer
        old.check_ended()
        self._keep_buffers(survey.buffers)
        self._agree(survey, collective=True)
        old.remove_hooks()
        self._module_parameters = list(survey.parameters.values())
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self._make_reducer(survey, generation=old.generation() + 1, step=old.step())
        self.reducer.set_finished(old.finished())
        for hook, state in self._comm_hooks:
            comm_hooks.attach(self.reducer, hook, state)
        optimizer_in_backward.attach_reducer(self)
        if self.mixed_precision is not None:
            mixed_precision.attach_reducer(self)

    def _start_features(self) -> None:
        """What needs the reducer."""
        self.logger = DDPLogger(self)
        if self.static_graph:
            self.logger._set_static_graph()
        if self.mixed_precision is not None:
            mixed_precision.install(self)
        if self._use_python_reducer:
            python_reducer.install(self)

    def _keep_hook(self, hook: comm_hooks.Hook, state: object, name: str) -> None:
        """Notes a comm hook that the reducer has taken, for logging data, copies and the timeline."""
        self.logger._set_comm_hook_name(name)
        self._comm_hooks.append((hook, state))
        self._describe_assignment()

    def _describe_assignment(self) -> None:
        recording.describe(buckets.assignment(self), owner=self)


@functools.cache
def _learn_references() -> None:
    """What the reducer has to know before it reduces gradients in place, once for each process."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        _C.learn_references(leaf)
        (leaf * 2.0).sum().backward()
