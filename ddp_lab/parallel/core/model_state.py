"""What the parts of `DistributedDataParallel` share: its attributes, and methods that one part calls of another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

if TYPE_CHECKING:
    from ..features.delayed import DelayedParameters
    from ..features.join import Meeting
    from ..features.logging_data import DDPLogger
    from ..features.mixed_precision import LowPrecision
    from ..live.reconfigure import Applied
    from ..live.requests import Live
    from .arguments import BucketCaps
    from .bucket_order import OrderFollower
    from .parameters import Seen, Survey

__all__ = ["ModelState"]


class ModelState(TorchDDP):
    """Base of each part. Names without an underscore, and most with one, are torch's: libraries read them."""

    # what is trained, and with whom
    module: torch.nn.Module
    process_group: dist.ProcessGroup
    device_mesh: Any
    reducer: Any  # ddp_lab._C.Reducer
    reducer_id: int
    logger: DDPLogger  # None until the reducer is there
    _survey: Survey
    _seen: Seen  # of the survey, or newer with the same parameters
    _is_sharded: bool  # over the other dimensions of the device mesh
    _idle_seen: Seen | None  # when all parameters were frozen
    _module_parameters: list[torch.nn.Parameter]
    parameters_to_ignore: set[str]

    # trained parameters, by their index in the reducer
    _names: list[str]
    _trained: list[torch.nn.Parameter]
    _sizes: list[int]  # bytes
    _keys: list[tuple[torch.dtype, torch.device]]
    _sparse: list[bool]
    _assignment: list[list[int]]
    _has_rebuilt_buckets: bool
    _order_follower: OrderFollower | None
    _step_agreed: bool
    _live: Live | None  # what is asked of it while it trains
    _reconfigured: Applied | None  # the last change made live

    # arguments
    device: torch.device
    device_type: str
    device_ids: list[int] | None
    output_device: int | None
    dim: int
    is_multi_device_module: bool
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    lazy_bucket_allocation: bool
    mixed_precision: Any
    use_side_stream_for_tensor_copies: bool
    bucket_bytes_cap: int
    bucket_bytes_cap_list: list[int]
    bucket_bytes_cap_default: bool
    broadcast_bucket_size: int
    _caps: BucketCaps
    _use_python_reducer: bool
    _python_hooks: list[Any]

    # gradients and buffers
    require_backward_grad_sync: bool
    _require_manual_backward_finalization: bool
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    modules_buffers: list[torch.Tensor]
    named_module_buffers: dict[str, torch.Tensor]
    _comm_hooks: list[tuple[Any, object]]  # hook and state
    _delayed: DelayedParameters | None
    _delay_all_reduce_params: list[torch.nn.Parameter]
    _delay_all_reduce_all_params: bool
    _lazy_init_ran: bool
    _ddp_sink_clone: bool
    _join_config: Any
    _join_warned: bool
    _meeting: Meeting
    _divide_by_initial_world_size: bool
    _authoritative_rank: int
    _low_precision: LowPrecision
    _was_low: bool

    if TYPE_CHECKING:

        def _agree(self, survey: Survey, *, collective: bool) -> int: ...
        def _assign_modules_buffers(self) -> None: ...
        def _distributed_broadcast_coalesced(
            self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
        ) -> None: ...
        def _check_sync_bufs_post_fwd(self) -> bool: ...
        def _check_sync_bufs_pre_fwd(self) -> bool: ...
        def _choose_parameters(self, survey: Survey) -> None: ...
        def _describe_assignment(self) -> None: ...
        def _first_assignment(self) -> list[list[int]]: ...
        def _keep_buffers(self, buffers: dict[str, torch.Tensor]) -> None: ...
        def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn: ...
        def _logged(self) -> AbstractContextManager[None]: ...
        def _make_reducer(self, survey: Survey, *, generation: int = 0, step: int = 0) -> None: ...
        def _reassign(self, order: list[int]) -> None: ...
        def _rebuild_if_due(self, sync: bool) -> None: ...
        def _renew_reducer(self, survey: Survey) -> None: ...
        def _start_features(self) -> None: ...
        def _sync_buffers(self) -> None: ...
        def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None: ...
