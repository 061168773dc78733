"""The data of `_get_ddp_logging_data`: a model's settings, and the cost of a sampled step.

[Note: when logging data is taken]
The data of a run is taken at the begin of a synchronised forward and describes the backward before it: `iteration` n
is the number of synchronised forwards before this one. It is taken in the first ten iterations and then in every
hundredth (`_set_ddp_runtime_logging_sample_rate`). Constant fields are there from the start. Times are
nanoseconds; those that end in ``_start`` and ``_end`` count from 1970, as torch's do.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from ..core import process_groups
from ..core.synchronizer import GradientSynchronizer

__all__ = ["DDPLogger"]

_FIRST_ITERATIONS = 10
_SAMPLE_RATE = 100
_ABSENT = "N/A"

_C_NAMES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>", torch.complex128: "c10::complex<double>", torch.int64: "long int",
}  # fmt: skip
_ENVIRONMENT = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_DEBUG",
        "NCCL_NTHREADS", "NCCL_IB_TIMEOUT",
    ),
}  # fmt: skip
_GLOO_THREADS = 2


class DDPLogger:
    """Facts of one model, kept as the dict that `_get_ddp_logging_data` returns.

    See [Note: when logging data is taken].

    Args:
        sync: the model's.
        **facts: fields that only the wrapper knows.
    """

    def __init__(self, sync: GradientSynchronizer, **facts: Any) -> None:
        self._sync = sync
        self._data: dict[str, Any] = {"iteration": 0}
        self._iteration = 0
        self._samples = 0
        self._reducer_error = ""
        self._sample_rate = _SAMPLE_RATE
        self._set_up(facts)

    # -- called by torch's code

    def set_error_and_log(self, error: str) -> None:
        """Stores the text of a raised error."""
        self._data.update(has_error=1, error=error)

    def _set_static_graph(self) -> None:
        self._data["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._data["join_uneven_inputs"] = 1

    def set_sample_rate(self, rate: int) -> None:
        """Data is taken every `rate` iterations after the first ten."""
        self._sample_rate = rate

    # -- called by our code

    def _set_up(self, facts: dict[str, Any]) -> None:
        """Stores the facts known at construction."""
        sync = self._sync
        tensors, options = sync.trained.tensors, sync.options
        backend = process_groups.backend_name(sync.group)
        self._data.update(
            module_name=type(sync.module).__name__,
            world_size=sync.group.size(),
            rank=sync.group.rank(),
            num_parameter_tensors=len(tensors),
            total_parameter_size_bytes=sum(sync.trained.bytes),
            dtypes=", ".join(sorted({_C_NAMES.get(p.dtype, str(p.dtype)) for p in tensors})),
            bucket_sizes=self._bucket_sizes(),
            broadcast_buffers=int(sync.buffers.enabled),
            has_sync_bn=int(sync.survey.batch_norm is not None),
            bucket_cap_bytes=sync.caps.others,
            find_unused_parameters=int(options.find_unused_parameters),
            gradient_as_bucket_view=int(options.gradient_as_bucket_view),
            backend_name=backend,
            **facts,
        )
        if options.static_graph:
            self._set_static_graph()
        for name in ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"):
            self._data[name.lower()] = os.environ.get(name, _ABSENT)
        for name in _ENVIRONMENT.get(backend, ()):
            self._data[name.lower().removeprefix("torch_")] = os.environ.get(name, _ABSENT)
        if backend == "gloo":
            self._data["gloo_num_threads"] = _GLOO_THREADS

    def begin_iteration(self) -> None:
        """Called at the begin of each synchronised forward: takes the data of the backward before it, if it is due."""
        iteration = self._iteration
        self._iteration += 1
        if iteration and (iteration <= _FIRST_ITERATIONS or iteration % self._sample_rate == 0):
            self._take(iteration)

    def data(self) -> dict[str, Any]:
        """A copy of the data, with the reducer's latest error and the comm hook that there is now."""
        self._keep_error(self._sync.reducer.report()["error"])
        name = self._sync.hook_name
        if name is not None or "comm_hook" in self._data:
            self._data["comm_hook"] = name or ""
        return dict(self._data)

    def _keep_error(self, error: str) -> None:
        """Stores the reducer's last error, if it is new."""
        if error != self._reducer_error:
            self._reducer_error = error
            self.set_error_and_log(error)

    def _take(self, iteration: int) -> None:
        sync = self._sync
        report = sync.reducer.report()
        rebuilt = sync.has_rebuilt_buckets
        self._data.update(
            iteration=iteration,
            unused_parameter_size=report["unused_parameter_size"],
            num_buckets_reduced=report["num_buckets_reduced"],
            prev_iteration_grad_ready_order_indices=", ".join(map(str, report["ready_order_last"])),
            has_rebuilt_buckets=int(rebuilt),
            can_set_static_graph=bool(sync.reducer._ddp_graph_static()),
        )
        if rebuilt:
            self._data["rebuilt_bucket_sizes"] = self._bucket_sizes()
            self._data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket)) for bucket in sync.assignment
            )
        self._keep_error(report["error"])
        self._take_times(report)

    def _take_times(self, report: dict[str, Any]) -> None:
        forward, compute, compute_end = (
            report["forward_begin"], report["backward_begin"], report["backward_compute_end"],
        )  # fmt: skip
        sent, received = report["communication_begin"], report["communication_end"]
        if not (forward and compute and sent):
            return
        epoch = time.time_ns() - time.monotonic_ns()
        durations = {
            "forward_compute_time": compute - forward,
            "backward_compute_time": compute_end - compute,
            "backward_comm_time": received - sent,
            "backward_compute_comm_overlap_time": max(0, min(compute_end, received) - sent),
        }
        self._samples += 1
        for name, value in durations.items():
            mean = self._data.get(f"avg_{name}", 0)
            self._data[name] = value
            self._data[f"avg_{name}"] = mean + (value - mean) // self._samples
        self._data.update(
            forward_compute_time_start=forward + epoch,
            backward_compute_time_start=compute + epoch,
            backward_compute_time_end=compute_end + epoch,
            backward_comm_time_start=sent + epoch,
            backward_comm_time_end=received + epoch,
        )

    def _bucket_sizes(self) -> str:
        sizes = self._sync.trained.bytes
        return ", ".join(str(sum(sizes[i] for i in bucket)) for bucket in self._sync.assignment)
