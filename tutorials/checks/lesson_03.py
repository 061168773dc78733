"""Checks of lesson 3."""

import queue
import threading
from datetime import timedelta

from . import Checks, on_ranks


def passed_on(torch, dist, rank, world_size, pass_on):
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    outgoing, incoming = torch.full((4,), rank + 1.0), torch.zeros(4)
    try:
        pass_on(outgoing, incoming, group)
    except RuntimeError:
        return (
            "Not yet: the ranks still wait for each other until the timeout. At least one rank must not block in send."
        )
    before = (rank - 1) % world_size
    if torch.equal(incoming, torch.zeros(4)):
        return f"Not yet: nothing has arrived on rank {rank}. Is there a recv (or irecv and wait) into `incoming`?"
    if not torch.equal(incoming, torch.full((4,), before + 1.0)):
        return f"Not yet: rank {rank} should have received rank {before}'s {before + 1.0}, but has {incoming.tolist()}."
    return (
        "Right: all ranks send and receive at the same time. (Check once more: does each isend or irecv have its wait?)"
    )


def ring(torch, ring_all_reduce):
    for ranks, length in ((2, 6), (4, 10)):
        tensors, sent, raised = _play(torch, ring_all_reduce, ranks, length)
        begin = torch.arange(1.0, length + 1)
        wanted = begin * sum(10**place for place in range(ranks))
        if raised:
            return f"Not yet: with {ranks} ranks: {raised[0]}."
        if torch.equal(tensors[0], begin):
            return (
                "Not yet: the tensor is as it was. Start with the steps that add: pass a part on, add the part that "
                "arrives."
            )
        if not all(torch.equal(tensor, wanted) for tensor in tensors):
            if all((tensor == wanted).any() for tensor in tensors):
                return (
                    f"Not yet: with {ranks} ranks each has one finished part, but not all parts. Pass the finished "
                    "ones on."
                )
            found = f"rank 0 has {tensors[0].tolist()}, but the sum is {wanted.tolist()}"
            return f"Not yet: with {ranks} ranks {found}. Which part in which step?"
        if max(sent) > 2 * (ranks - 1) * -(-length // ranks):
            times = max(sent) / length
            return (
                f"Not yet: the sums are right, but a rank sent {times:.1f} times the buffer. Pass on single parts only."
            )
    return f"Right: each of {ranks} ranks sent {max(sent) / length:.2g} times the buffer."


def _play(torch, ring_all_reduce, ranks, length):
    """The ring between threads: each rank's tensor after it, how many elements each has sent, what was raised."""
    boxes, sent, raised = [queue.SimpleQueue() for _ in range(ranks)], [0] * ranks, []
    tensors = [torch.arange(1.0, length + 1) * 10**place for place in range(ranks)]

    def one(place):
        def pass_on(outgoing, incoming, group=None):
            sent[place] += outgoing.numel()
            boxes[(place + 1) % ranks].put(outgoing.clone())
            incoming.copy_(boxes[place].get(timeout=3))

        try:
            ring_all_reduce(tensors[place], place, ranks, pass_on)
        except queue.Empty:
            raised.append("a rank waits for a part that no rank passes on")
        except Exception as error:  # noqa: BLE001 (the reader's own, shown in the verdict)
            raised.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(place,)) for place in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tensors, sent, raised


check = Checks(on_ranks(passed_on), on_ranks(ring))
