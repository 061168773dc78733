"""What a model of ours offers for being changed while it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...protocol.commands import Change
from ..core.model_state import ModelState
from . import change, hooks
from .reconfigure import apply_now

__all__ = ["LiveModel"]


class LiveModel(ModelState):
    """The part of `DistributedDataParallel` that changes buckets and comm hook between two steps."""

    def reconfigure(
        self,
        *,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        order: str | Sequence[str] | None = None,
        comm_hook: str | None = None,
    ) -> None:
        """Changes the buckets, their order or the comm hook from the next forward on. All ranks call it alike.

        From a notebook, while a cell trains: `Cluster.reconfigure`.

        Args:
            bucket_cap_mb: cap of all buckets in MiB; of all but the first if `first_bucket_mb` is given.
            first_bucket_mb: cap of the bucket that is launched first.
            bucket_cap_mb_list: caps in the order of launch, the last one repeats; not beside the other two.
            order: ``"ready"`` (as rank 0's gradients became ready last), ``"registration"``, ``"reversed"``, or the
                qualified names of all trained parameters.
            comm_hook: ``"none"``, ``"fp16"``, ``"bf16"``, ``"powersgd"``, or a name that was given to a hook on all
                ranks with `define_comm_hook`.

        Raises:
            ValueError: it makes no sense for this model.
            RuntimeError: this model can't be changed so, the ranks call it with other arguments, or a backward is
                unfinished.
        """
        apply_now(self, Change(bucket_cap_mb, first_bucket_mb, bucket_cap_mb_list, order, comm_hook))

    @staticmethod
    def define_comm_hook(
        name: str, hook: Callable[..., Any], state: Callable[[ModelState], object] | None = None
    ) -> None:
        """Gives a comm hook a name by which `reconfigure` can ask for it, for any model. On all ranks.

        Args:
            name: a later definition replaces an earlier one.
            hook: ``hook(state, bucket) -> Future[Tensor]``.
            state: makes the hook's state for a model, without communication; None: the state is None.

        Raises:
            TypeError: the hook is not callable.
            ValueError: its signature is another one, or the name is one of torch's hooks.
        """
        hooks.define(name, hook, state)

    def configuration(self) -> dict[str, Any]:
        """What `reconfigure` can change, as it is: caps in MiB, the comm hook's name, the number of buckets."""
        return change.describe(self)
