"""`ddp_lab.replace_torch_ddp()`: programs that construct torch's DistributedDataParallel get ours, without changes.

[Note: what replace_torch_ddp() reaches]
Trainers import the class by name (`from torch.nn.parallel import DistributedDataParallel as DDP`), so each module that
was imported before holds a reference of its own. All of them are replaced by our class, under any name; modules
imported later take it from `torch.nn.parallel`. Not reached are models wrapped before, classes derived from torch's
before, and references in closures or default arguments. Our own modules keep torch's class as the base.
"""

from __future__ import annotations

import sys

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .distributed import DistributedDataParallel

__all__ = ["Replacement", "replace_torch_ddp"]

_OURS = __name__.split(".")[0]


class Replacement:
    """The changes of `replace_torch_ddp`; `undo`, or the end of a ``with`` block, reverts them."""

    def __init__(self) -> None:
        self._changed = _point_at(DistributedDataParallel, instead_of=TorchDDP)

    def undo(self) -> None:
        """Restores torch's class in the modules that had it. A second call does nothing.

        Modules first imported in between keep ours.
        """
        for module_name, name in self._changed:
            module = sys.modules.get(module_name)
            if module is not None and vars(module).get(name) is DistributedDataParallel:
                vars(module)[name] = TorchDDP
        self._changed = []

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def replace_torch_ddp() -> Replacement:
    """Replaces `torch.nn.parallel.DistributedDataParallel` by our class in this process, in every module that has it.

    Call it in each rank before the model is wrapped, e.g. as the first lines of a training script. A second call
    only changes modules that still have torch's class. `ddp_lab.install` is the same function.

    Returns:
        A context manager whose end undoes this call; it may be ignored.

    Example:
        >>> import ddp_lab
        >>> ddp_lab.replace_torch_ddp()  # then accelerate, Lightning and your own code wrap their models with ours
        >>> with ddp_lab.replace_torch_ddp():
        ...     model = torch.nn.parallel.DistributedDataParallel(net)
    """
    return Replacement()


def _point_at(new: type, *, instead_of: type) -> list[tuple[str, str]]:
    """Replaces a class in the namespaces of all imported modules but ours; returns (module, name) of each place."""
    changed = []
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == _OURS:
            continue
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        for name in [name for name, value in list(namespace.items()) if value is instead_of]:
            namespace[name] = new
            changed.append((module_name, name))
    return changed
