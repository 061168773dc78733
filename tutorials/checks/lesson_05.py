"""Checks of lesson 5."""

from . import Checks, on_ranks


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


check = Checks(on_ranks(averaged_gradients), on_ranks(weighed_loss))
