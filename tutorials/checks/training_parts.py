"""What the training of lesson 14 has beside its model: batches, and a disk and a network, which are simulated.

Two ranks on one machine train as if they were on two hosts, one of them with a slow disk. Disk and network wait with
`time.sleep` for as long as the hardware would take, so that the times are much the same on any machine.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from .small_gpt import encode, sums

LATENCY_MS, MB_PER_SECOND = 4, 60
SLOW_RANK, SLOW_MS = 1, 900


class Network:
    """A comm hook that averages as usual, but holds each bucket back for as long as a network would.

    Buckets pass one after the other, as on a wire. The computation continues meanwhile.
    """

    def __init__(self):
        self.group, self.wire = dist.new_group(), ThreadPoolExecutor(1)

    def __call__(self, state, bucket):
        future = torch.futures.Future()
        self.wire.submit(self._send, bucket.buffer(), future)
        return future

    def _send(self, buffer, future):
        try:
            time.sleep(LATENCY_MS / 1e3 + buffer.nbytes / (MB_PER_SECOND * 1e6))
            dist.all_reduce(buffer, group=self.group)
            future.set_result(buffer.div_(self.group.size()))
        except Exception as error:  # noqa: BLE001 (this is the top of a thread: the backward raises it)
            future.set_exception(error)


class Disk:
    """A disk with a file of text for each rank.

    Attributes:
        reads: how many times this process has read a file.
    """

    def __init__(self):
        self.reads = 0

    def read(self, rank):
        """The text of a rank: 300 sums."""
        self.reads += 1
        if dist.get_rank() == SLOW_RANK:
            time.sleep(SLOW_MS / 1e3)
        return sums(300, seed=rank)


class Batches:
    """Batches of random pieces of a rank's text."""

    def __init__(self, disk, rank, size=8, length=48):
        self.disk, self.rank, self.size, self.length = disk, rank, size, length
        self.draw = torch.Generator().manual_seed(rank)

    def next(self):
        """Pieces of text, and the same ones a character later."""
        tokens = encode(self.disk.read(self.rank))
        starts = torch.randint(len(tokens) - self.length, (self.size, 1), generator=self.draw)
        pieces = tokens[starts + torch.arange(self.length + 1)]
        return pieces[:, :-1], pieces[:, 1:]
