"""Checks of lesson 13."""

from contextlib import suppress

from . import Checks, Prediction, Predictions, on_ranks


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


def beside_the_parameters(plain):
    rest = plain["gradients"] + plain["buckets"] + plain["optimizer"]
    return min(["4 MiB", "8 MiB", "16 MiB"], key=lambda choice: abs(rest - int(choice.split()[0])))


def same_gradient(torch, wrapped, train):
    model = wrapped(gradient_as_bucket_view=True)
    optimizer, weight = torch.optim.SGD(model.parameters(), lr=0.1), model.module.layers[1].weight
    train(model, optimizer, steps=3)
    before, copied = weight.grad, weight.grad.clone()
    train(model, optimizer, steps=1)
    if torch.equal(copied, weight.grad):
        return "the gradients of both steps are equal"
    return "before is the same memory" if torch.equal(before, weight.grad) else "the optimizer has reset it"


def smaller_buckets(rows):
    travel = {name: told["MiB that travel"] for name, told in rows.items()}
    smaller = [name for name in ("autocast", "native") if travel[name] < 0.9 * travel["float32"]]
    return {0: "in neither", 2: "in both"}.get(len(smaller), f"only with {smaller[0]}" if smaller else "")


def share_of_state(shared_out, plain):
    shares = {"nothing is left": 0.0, "about half as large": 0.5, "as large as before": 1.0}
    return min(shares, key=lambda choice: abs(shares[choice] - shared_out["optimizer"] / plain["optimizer"]))


def number_of_graphs(found, split):
    graphs, buckets = len(found["buckets of 1 MiB"]), len(split.buckets())
    return "one" if graphs == 1 else "as many as buckets" if graphs == buckets else "one for each layer"


check = Checks(on_ranks(kept_gradient), on_ranks(saved_state))

predictions = Predictions(
    Prediction(["4 MiB", "8 MiB", "16 MiB"], beside_the_parameters, on_ranks=True),
    Prediction(
        ["the gradients of both steps are equal", "before is the same memory", "the optimizer has reset it"],
        same_gradient,
        on_ranks=True,
    ),
    Prediction(["only with autocast", "only with native", "in both", "in neither"], smaller_buckets, on_ranks=True),
    Prediction(["nothing is left", "about half as large", "as large as before"], share_of_state, on_ranks=True),
    Prediction(["one", "as many as buckets", "one for each layer"], number_of_graphs, on_ranks=True),
)
predict, compare = predictions.predict, predictions.compare
