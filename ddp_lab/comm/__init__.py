"""Backends of our own for torch.distributed; importing this registers them.

After `import ddp_lab.comm`, ``"shm"`` is a name like ``"gloo"``: `torch.distributed.init_process_group("shm")`,
`new_group(backend="shm")`, under torchrun or anywhere.
"""

from __future__ import annotations

from .shared_memory import register

__all__ = ["register"]

register()
