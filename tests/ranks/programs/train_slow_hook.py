"""A script that knows nothing of ddp_lab: its comm hook spends 10 ms on each bucket, and there are many.

Argument: how many steps.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def slow_all_reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    time.sleep(0.01)
    size = dist.get_world_size()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0] / size)


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)]), bucket_cap_mb=0.004)
    model.register_comm_hook(None, slow_all_reduce)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
    if dist.get_rank() == 0:
        print("trained", steps, "steps, at the end with", len(getattr(model, "buckets", list)()), "buckets")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
