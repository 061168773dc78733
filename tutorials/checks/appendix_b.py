"""Checks of appendix B."""

from contextlib import suppress
from datetime import timedelta
from uuid import uuid4

from . import Checks, Prediction, Predictions, call_with_names, on_ranks


def a_barrier_out_of_a_store(dist, rank, world_size, store, kinds, barrier):
    new = [uuid4().hex]  # names that no check has used before
    dist.broadcast_object_list(new, src=0)
    theirs = dist.PrefixStore(f"barrier {new[0]}", store)
    notes = dist.PrefixStore(f"notes {new[0]}", kinds["FileStore"])
    before = store.num_keys()
    for name, late in (("first", world_size - 1), ("second", 0)):
        if rank == late:
            notes.wait([f"{name}: {other} calls" for other in range(world_size) if other != late])
            with suppress(RuntimeError):  # gives the others time to continue alone
                notes.wait([f"{name}: continued"], timedelta(seconds=0.9))
            notes.set(f"{name}: the late one calls", "")
        else:
            notes.set(f"{name}: {rank} calls", "")
        try:
            barrier(theirs, name)
        except RuntimeError as error:
            return f"Not yet: rank {rank} waits for a key that no rank sets: {str(error).splitlines()[0]}."
        alone = not notes.check([f"{name}: the late one calls"])
        notes.set(f"{name}: continued", "")
        if alone and name == "first":
            found = f"rank {rank} continued although rank {late} had not called barrier()"
            return f"Not yet: {found}. Set a key, and wait for the keys of the other ranks."
        if alone:
            found = f"the first barrier is right, but rank {rank} did not wait in the second"
            return f"Not yet: {found}. Is `name` part of your keys, and does every rank wait?"
    if store.num_keys() == before:
        return (
            "Not yet: the barrier works, but leaves no key in the store. Use the store, not a collective: ranks also "
            "need such a barrier before they have a group."
        )
    return (
        "Right: no rank continues before all ranks have called barrier(), each time. torch ends init_process_group() "
        "in this way."
    )


def a_backend(torch, dist, rank, world_size, five_seconds):
    group = dist.new_group(backend="postbox", timeout=five_seconds)
    numbers, share = torch.arange(1.0, 7).view(2, 3), sum(range(1, world_size + 1))
    tensor = numbers * (rank + 1)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if not isinstance(work, dist.Work):
        return "Not yet: allreduce must return a Work, as the other methods do. DDP waits for it."
    if torch.equal(tensor, numbers * (rank + 1)):
        return (
            "Not yet: the tensor is as it was. Write into it (copy_): the caller does not see a new tensor of the "
            "same name."
        )
    if torch.allclose(tensor, numbers * share / world_size):
        return "Not yet: this is the mean. all_reduce adds up; the caller divides if it needs a mean (DDP does)."
    if not torch.allclose(tensor, numbers * share):
        found, wanted = tensor.flatten().tolist(), (numbers * share).flatten().tolist()
        return f"Not yet: rank {rank} has {found}, but the sum is {wanted}."
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    if not torch.allclose(model.module.weight.grad, torch.full((1, 3), share / world_size)):
        return f"Not yet: the sum is right, but DDP's gradients are {model.module.weight.grad.tolist()}."
    return "Right: torch's DistributedDataParallel averaged its gradients over your backend."


def stores_with_the_key(lab):
    found = lab.pull("found", ranks=[1])[1]
    without = [name for name, there in found.items() if not there]
    if not without:
        return "in all four"
    if len(without) == 1:
        return f"in all but the {without[0]}"
    return f"only in the {' and the '.join(name for name, there in found.items() if there)}"


def methods_of_training(called):
    *names, last = [name for name in ("allreduce", "broadcast", "allgather", "barrier") if name in called]
    if len(names) == 3:
        return "all four"
    return f"{', '.join(names)} and {last}" if names else f"only {last}"


def slower_by(lab, times):
    if not all(lab.run(call_with_names, adds_up).values.values()):
        return "Not yet: solve exercise 2 first."
    ratio = times["postbox"][-1] / times["gloo"][-1]
    return "less than 3 times" if ratio < 3 else "3 to 300 times" if ratio < 300 else "more than 300 times"


def adds_up(torch, dist, world_size, five_seconds):
    ones = torch.ones(3)
    dist.all_reduce(ones, group=dist.new_group(backend="postbox", timeout=five_seconds))
    return bool((ones == world_size).all())


check = Checks(on_ranks(a_barrier_out_of_a_store), on_ranks(a_backend))

predictions = Predictions(
    Prediction(["in all four", "in all but the HashStore", "only in the TCPStore"], stores_with_the_key),
    Prediction(
        ["only allreduce", "allreduce and broadcast", "allreduce, broadcast and allgather", "all four"],
        methods_of_training,
        on_ranks=True,
    ),
    Prediction(["less than 3 times", "3 to 300 times", "more than 300 times"], slower_by),
)
predict, compare = predictions.predict, predictions.compare
