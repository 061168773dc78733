"""Backwards that the caller ends, with `finalize_backward()`. See [Note: a backward that the caller ends] in C++."""

from __future__ import annotations

from .core.model_state import ModelState

__all__ = ["ManualEnd"]


class ManualEnd(ModelState):
    """The part of `DistributedDataParallel` that ends backwards by hand; torch has it from 2.15 on.

    Example:
        >>> model.require_manual_backward_finalization = True
        >>> model(batch).sum().backward()  # starts the averages, waits for none
        >>> next_batch = load()  # whatever needs no gradients
        >>> model.finalize_backward()  # param.grad: the average over all ranks
        >>> optimizer.step()
    """

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the caller ends each synchronised backward with `finalize_backward`, exactly once.

        To be set before a forward, or when the last backward has been finalized.

        Raises:
            RuntimeError: set between a forward and the end of its backward, or for a model that has no reducer.
        """
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._check_manual_backward_finalization_supported()
        if self._delay_all_reduce_all_params:
            return
        with self._logged():
            self.reducer._set_manual_finalization_required(bool(required))
        self._require_manual_backward_finalization = bool(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` has to wait until the coming backward has returned. Ask after the forward.

        False: it may also be called in a hook of the backward, as soon as all parameters have their gradients.
        """
        if not self._require_manual_backward_finalization:
            return False
        after: bool = self.mixed_precision is not None or self.reducer._should_finalize_after_backward()
        return after

    def finalize_backward(self) -> None:
        """Waits for the averages that the last backward has started, and writes them to `param.grad`.

        Work goes to the device's current stream.

        Raises:
            RuntimeError: `require_manual_backward_finalization` is False; gradients are missing; or no synchronised
                backward waits for this. Also whatever the communication failed with.
        """
        self._check_manual_backward_finalization_supported()
        with self._logged():
            self.reducer._finalize_backward_manual()
        if self.mixed_precision is not None:
            self._low_precision.restore()

    def _check_manual_backward_finalization_supported(self) -> None:
        """Raises RuntimeError where nothing of ours ends a backward."""
        if self._delay_all_reduce_all_params:
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params: leave some to the reducer, or leave it False."
            )
        if self._use_python_reducer:
            raise RuntimeError(
                "Manual backward finalization is not supported with the Python reducer, in which the compiler "
                'reduces gradients: see torch._dynamo.config.optimize_ddp, which is "python_reducer".'
            )
