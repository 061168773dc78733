"""Checks and predictions of lesson 6, and the training that its last exercise examines."""

import random
import statistics
import time

import ddp_lab

from . import Checks, Prediction, Predictions, call_with_names, on_ranks


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


def bucket_order(on_ready, error, by_hand):
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
    return f"Right: the same order on every rank. The gradients are off by {error(by_hand(on_ready)):.1e}."


def slow_training():
    """Trains the lesson's network, with one rank that is slow in one layer; returns its number on the timeline."""
    return ddp_lab.current_cluster().run(call_with_names, _train_slowly).values[0]


def _train_slowly(rank, world_size, make_network, train):
    slow_rank, slow_layer = _slow_place(world_size)
    network = make_network()
    if rank == slow_rank:
        first, slow = (network.get_submodule(f"layer{number}").weight for number in (11, slow_layer))
        begun = []
        first.register_hook(lambda gradient: begun.append(time.perf_counter()))
        # On a busy machine every backward takes long, and so does this sleep.
        slow.register_hook(lambda gradient: time.sleep(max(0.020, 3 * (time.perf_counter() - begun[-1]))))
    return train(network, bucket_cap_mb=0.5).model_id


def _slow_place(world_size):
    dice = random.Random(2020)
    return dice.randrange(world_size), dice.randrange(1, 9)


def where_it_is_slow(lab, reducer, late_rank, late_bucket):
    true_rank, true_layer = _slow_place(lab.world_size)
    buckets = lab.timeline.assignment(reducer, lab.timeline.steps(reducer)["generation"].max())
    position = [parameter["name"] for parameter in buckets["parameters"]].index(f"layer{true_layer}.weight")
    true_bucket = next(bucket["bucket"] for bucket in buckets["buckets"] if position in bucket["parameters"])

    if not isinstance(late_rank, int) or not isinstance(late_bucket, int):
        return "Not yet: write two numbers into the cell above, late_rank and late_bucket, and run it."
    if late_rank != true_rank:
        return (
            f"Not yet: on rank {late_rank} the collectives take long because it waits. Which rank's gradients are late?"
        )
    if late_bucket != true_bucket:
        side = "an earlier bucket is already late" if late_bucket > true_bucket else "it is still on time"
        return f"Not yet: the rank is right, but bucket {late_bucket} is not the first late one: {side}."
    slept = f"Each backward slept there for at least 20 ms, at layer {true_layer}."
    return f"Right: rank {true_rank}, bucket {true_bucket}. {slept}"


def first_bucket(model):
    layers = {int(name.split(".")[0].removeprefix("layer")) for name in model.buckets()[0].parameters}
    return f"layers {', '.join(map(str, sorted(layers)))}"


def not_overlapped(network, buckets, overlapped):
    last = []

    def note(states, launch):
        index = states.index("ready")
        launch(index)
        if "pending" not in states:  # no gradient is missing: the backward is over
            last.append(index)

    overlapped(network, buckets, note)
    [index] = last
    names = [name for name, parameter in network.named_parameters() if any(parameter is p for p in buckets[index])]
    for layer, choice in (("layer0", _WITH_THE_FIRST), ("layer11", _WITH_THE_LAST)):
        if f"{layer}.weight" in names:
            return choice
    return "a bucket between them"


def at_once(lab):
    if "at-once" not in lab.results:
        return "Not yet: run the cell above first."
    failures = lab.results["at-once"].failures.values()
    if failures:
        return "a hang" if any(failure.name == "Timeout" for failure in failures) else "an error"
    mixed = max(lab.pull("mixed").values())
    return "wrong gradients, without an error" if mixed > 1e-3 else "the right gradients: both compute the same sum"


def ready_too_early(one_event_later):
    state = one_event_later[1].buckets[1].state
    if state == "pending":  # what is ready has another number
        return "it becomes bucket 0"
    return {"ready": "it waits until bucket 0 is launched", "launched": "it is launched at once"}.get(state, state)


def slower_size(size):
    names = {"each gradient": "one bucket for each gradient", "all in one": "one bucket for all gradients"}
    return names[max(names, key=lambda name: statistics.median(size[name]))]


_WITH_THE_FIRST, _WITH_THE_LAST = "the bucket with the first layer", "the bucket with the last layer"

check = Checks(on_ranks(averaged_bucket), on_ranks(bucket_order, timeout=30), where_it_is_slow)

predictions = Predictions(
    Prediction(["layers 0, 1, 2", "layers 5, 6, 7", "layers 9, 10, 11"], first_bucket, on_ranks=True),
    Prediction([_WITH_THE_FIRST, _WITH_THE_LAST, "a bucket between them"], not_overlapped, on_ranks=True),
    Prediction(
        [
            "an error",
            "a hang",
            "wrong gradients, without an error",
            "the right gradients: both compute the same sum",
        ],
        at_once,
    ),
    Prediction(
        ["it is launched at once", "it waits until bucket 0 is launched", "it becomes bucket 0"], ready_too_early
    ),
    Prediction(["one bucket for each gradient", "one bucket for all gradients"], slower_size),
)
predict, compare = predictions.predict, predictions.compare
