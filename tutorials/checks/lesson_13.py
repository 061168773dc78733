"""Checks of lesson 13."""

from contextlib import suppress

from . import Checks, on_ranks


def kept_gradient(torch, wrapped, train, model, weight, before):
    other = wrapped()  # the same training, without views
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), steps=3)
    wanted = other.module.layers[1].weight.grad
    if not model.gradient_as_bucket_view:
        return (
            "Not yet: without views there is nothing to fix, but one more copy of all gradients. Leave the option "
            "as it was."
        )
    if not torch.is_tensor(before) or before.shape != wanted.shape:
        return "Not yet: before should be a tensor of the gradient's shape."
    if before.untyped_storage().data_ptr() == weight.grad.untyped_storage().data_ptr():
        return "Not yet: before is in the bucket, and the fourth step wrote into that too. It needs memory of its own."
    if not torch.allclose(before, wanted, rtol=1e-3, atol=1e-6):
        return (
            "Not yet: before has memory of its own, but not the gradient of the third step. Copy it before the fourth."
        )
    return "Right: a copy survives the next backward; a view does not."


def saved_state(dist, rank, world_size, wrapped, train, Zero, checkpoint):
    model, called = wrapped(), []
    optimizer = Zero(model.parameters())
    train(model, optimizer, steps=1)
    optimizer.consolidate_state_dict = lambda to=0: called.append(to)  # the first time, only note which ranks call it
    with suppress(RuntimeError):  # the state is not there yet
        checkpoint(optimizer)
    del optimizer.consolidate_state_dict
    callers = [None] * world_size
    dist.all_gather_object(callers, called)
    absent = [number for number, calls in enumerate(callers) if not calls]
    if len(absent) == world_size:
        return "Not yet: rank 0 has only the state of its own parameters. The ranks must consolidate it first."
    if absent:
        why = "It is a collective: the other ranks would wait forever."
        return f"Not yet: rank {absent} did not call consolidate_state_dict. {why}"
    if any(calls != [0] for calls in callers):
        return "Not yet: the state must be consolidated once, on rank 0: every rank calls it once, with to=0."
    try:
        saved = checkpoint(optimizer)
    except RuntimeError as error:
        return f"Not yet: on rank {rank}: {error}"
    if rank == 0 and (not isinstance(saved, dict) or len(saved.get("state", ())) != len(list(model.parameters()))):
        return "Not yet: rank 0 should return state_dict(), with the state of every parameter."
    if rank != 0 and saved is not None:
        return f"Not yet: rank {rank} should return None; otherwise every rank writes the file."
    return "Right: rank 0 has the state of all parameters, the others None."


check = Checks(on_ranks(kept_gradient), on_ranks(saved_state))
