"""Checks of lesson 5."""

from . import Checks, Prediction, Predictions, on_ranks


def averaged_gradients(
    world_size, ByHand, make_network, backward, gradients, largest_difference, mine, own, everything
):
    def same(one, other):
        return largest_difference(one, other) < 1e-4

    model = ByHand(make_network())
    backward(model, mine)
    model.average_gradients()
    found = gradients(model)
    if same(found, own):
        return "Not yet: the gradients are still this rank's own. Add up each parameter.grad over the ranks first."
    if same(found, own / world_size):
        return "Not yet: this rank's own gradients were divided, but not added up over the ranks first."
    if same(found, everything * world_size):
        return "Not yet: these are sums over the ranks. Divide by world_size."
    if not same(found, everything):
        return "Not yet: some gradients are averages, some are not. Is every parameter averaged exactly once?"
    return "Right: every rank has the gradients of the whole batch."


def weighed_loss(world_size, weight, samples, total):
    wanted = world_size * samples / total
    if abs(weight - wanted) < 1e-6:
        return f"Right: {weight:g} on this rank. Each of the {total} samples counts once."
    if abs(weight - 1) < 1e-6:
        return (
            "Not yet: with equal weights, each of rank 1's 16 samples counts three times as much as one of rank 0's 48."
        )
    if abs(weight * world_size - wanted) < 1e-6:
        return (
            "Not yet: the ratio of the weights is right, but they add up to 1. The average divides by world_size "
            "once more."
        )
    if (weight < 1) == (wanted > 1):
        return f"Not yet: {weight:g} is on the wrong side of 1. A rank with more samples must count for more."
    return (
        f"Not yet: {weight:g} is not the weight. Write the mean over all samples as sums of the two ranks, and compare."
    )


def operation(own, everything, world_size, dist):
    total = own.clone()
    dist.all_reduce(total)
    found = {"sum": total, "average": total / world_size, "difference": 2 * own - total}
    return min(found, key=lambda name: float((found[name] - everything).abs().max()))


def exactness(ByHand, make_network, backward, gradients, mine, everything, largest_difference):
    model = ByHand(make_network())
    backward(model, mine)
    model.average_gradients()
    difference = largest_difference(gradients(model), everything)
    if difference > 1e-4:
        return "Not yet: solve exercise 1 first."
    return "exactly equal" if difference == 0 else "equal except for the last digits"


def growth(averaged, one_process, largest_difference):
    return "no, it stays below 0.1 %" if largest_difference(averaged, one_process) < 1e-3 else "yes, to about 1 %"


def factor(ratio):
    return min(["1", "2", "4"], key=lambda choice: abs(ratio - 1 / int(choice)))


def norms(layer_norm, batch_norm):
    equal = [name for name, difference in [("LayerNorm", layer_norm), ("BatchNorm", batch_norm)] if difference < 1e-4]
    return {2: "with both", 0: "with neither"}.get(len(equal), f"with {equal[0]} only" if equal else "")


def against_ddp(with_ddp, averaged, largest_difference):
    return "zero, or in the last digits" if largest_difference(with_ddp, averaged) < 1e-4 else "about 1 %"


check = Checks(on_ranks(averaged_gradients), on_ranks(weighed_loss))

predictions = Predictions(
    Prediction(["sum", "average", "difference"], operation, on_ranks=True),
    Prediction(["exactly equal", "equal except for the last digits"], exactness, on_ranks=True),
    Prediction(["yes, to about 1 %", "no, it stays below 0.1 %"], growth, on_ranks=True),
    Prediction(["1", "2", "4"], factor, on_ranks=True),
    Prediction(["with both", "with neither", "with LayerNorm only", "with BatchNorm only"], norms, on_ranks=True),
    Prediction(["zero, or in the last digits", "about 1 %"], against_ddp, on_ranks=True),
)
predict, compare = predictions.predict, predictions.compare
