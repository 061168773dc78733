"""Checks of lesson 6."""

from . import Checks, on_ranks


def averaged_bucket(torch, dist, rank, world_size, average):
    gradients = [torch.full((2, 3), float(rank)), torch.arange(4.0) * (rank + 1)]
    before, wanted = [g.clone() for g in gradients], []
    for gradient in gradients:
        total = gradient.clone()
        dist.all_reduce(total)
        wanted.append(total / world_size)
    collectives, all_reduce = [], dist.all_reduce

    def counted(*args, **options):
        collectives.append(args)
        return all_reduce(*args, **options)

    dist.all_reduce = counted
    try:
        average(gradients)
    finally:
        dist.all_reduce = all_reduce
    if all(map(torch.equal, gradients, before)) and not collectives:
        return (
            "Not yet: average() changed nothing. Start with a flat buffer: torch.cat([g.flatten() for g in gradients])."
        )
    if len(collectives) != 1:
        return (
            f"Not yet: average() called dist.all_reduce {len(collectives)} times. One flat buffer needs only one call."
        )
    if all(torch.allclose(g, w * world_size) for g, w in zip(gradients, wanted, strict=True)):
        return "Not yet: the gradients are sums over the ranks. Divide by world_size."
    if not all(map(torch.allclose, gradients, wanted)):
        return (
            "Not yet: one collective, but the gradients are not the averages. Is each slot copied back to its gradient?"
        )
    return "Right: one collective, and every gradient is the average."


def bucket_order(on_ready, errors, by_hand):
    for arrival in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        states, launched = ["pending"] * 4, []

        def launch(index, states=states, launched=launched):
            launched.append(index)
            states[index] = "launched"

        for index in arrival:
            states[index] = "ready"
            on_ready(states, launch)
            told = f"buckets become ready in the order {arrival}; after bucket {index} you have launched {launched}"
            if len(set(launched)) < len(launched):
                return f"Not yet: {told}, one of them twice. Launch only ready buckets."
            if launched != sorted(launched) or any(states[i] == "pending" for i in range(max(launched, default=0))):
                return f"Not yet: {told}. That is not in bucket order: a bucket has to wait for all buckets before it."
            waiting = next((i for i in range(4) if states[i] != "launched"), None)
            if waiting is not None and states[waiting] == "ready":
                return (
                    f"Not yet: {told}. Bucket {waiting} could be in flight too: continue while the next one is ready."
                )
    return f"Right: the same order on every rank. Off by: {errors(by_hand)}."


def where_it_is_slow(lab, late_rank, late_bucket):
    true_rank, true_layer = lab.pull("hidden")[0]
    reducer = lab.pull("hidden_reducer")[0]
    buckets = lab.timeline.assignment(reducer, lab.timeline.steps(reducer)["generation"].max())
    position = [parameter["name"] for parameter in buckets["parameters"]].index(f"layer{true_layer}.weight")
    true_bucket = next(bucket["bucket"] for bucket in buckets["buckets"] if position in bucket["parameters"])

    if late_rank is None or late_bucket is None:
        return "Not yet: write two numbers into the cell above, late_rank and late_bucket, and run it."
    if late_rank != true_rank:
        return (
            f"Not yet: on rank {late_rank} the collectives take long because it waits. Which rank's gradients are late?"
        )
    if late_bucket != true_bucket:
        side = "an earlier bucket is already late" if late_bucket > true_bucket else "it is still on time"
        return f"Not yet: the rank is right, but bucket {late_bucket} is not the first late one: {side}."
    return f"Right: rank {true_rank}, bucket {true_bucket}. Each backward slept for 20 ms there, at layer {true_layer}."


check = Checks(on_ranks(averaged_bucket), on_ranks(bucket_order, timeout=30), where_it_is_slow)
