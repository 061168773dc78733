"""Checks and predictions of lesson 8."""

import numpy

from . import Checks, Prediction, Predictions, on_ranks


def accumulated(torch, dist, ddp_lab, world_size, make_network, loss_of, images, labels, pieces, accumulate):
    training = _Training(torch, dist, ddp_lab, world_size, make_network, loss_of, images, labels)
    synced, found = training.by(lambda model, optimizer: accumulate(model, optimizer, pieces[:4]))
    if synced == 0:
        return "Not yet: no backward synchronised with the other rank. The last piece must be outside no_sync()."
    if synced > 1:
        return (
            f"Not yet: {synced} of 4 backwards synchronised with the other rank. Put all but one inside no_sync(), "
            "forward *and* backward."
        )
    if torch.allclose(found, training.of_one_process((0, 4, 0.1)), atol=1e-6):
        return "Right: one synchronisation, and the step of one process with the whole batch."
    if torch.allclose(found, training.of_one_process((0, 4, 0.4)), atol=1e-6):
        return (
            "Not yet: one synchronisation, but the step is 4 times too long. Divide each loss by the number of pieces."
        )
    return (
        "Not yet: one synchronisation, but the step differs from that of one process. Only the *last* backward can "
        "average them all."
    )


def whole_epoch(torch, dist, ddp_lab, world_size, make_network, loss_of, images, labels, pieces, epoch):
    training = _Training(torch, dist, ddp_lab, world_size, make_network, loss_of, images, labels)
    synced, found = training.by(lambda model, optimizer: epoch(model, optimizer, pieces, 4))
    first, two = found.clone(), [(0, 4, 0.1), (4, 8, 0.1)]
    dist.broadcast(first, 0)
    drift = (found - first).abs().max()
    dist.all_reduce(drift, dist.ReduceOp.MAX)
    if drift > 1e-6:
        return "Not yet: the ranks' parameters differ. A rank took a step with gradients that were not averaged."
    if torch.allclose(found, training.of_one_process(*two), atol=1e-6):
        return "Not yet: pieces 9 and 10 have no effect."
    if torch.allclose(found, training.of_one_process(*two, (8, 10, 0.05)), atol=1e-6):
        return "Not yet: the last step is half as long as it should be. Take the mean of 2 pieces, not of 4."
    if not torch.allclose(found, training.of_one_process(*two, (8, 10, 0.1)), atol=1e-6):
        return "Not yet: these are not three steps of 4, 4 and 2 pieces. Are gradients zeroed between steps?"
    if synced > 3:
        return f"Not yet: the steps are right, but {synced} backwards synchronised the ranks. Three are enough."
    return "Right: all 10 pieces count, each with the same weight within its step."


class _Training:
    """The lesson's network, trained by the reader's function and as one process would."""

    def __init__(self, torch, dist, ddp_lab, world_size, make_network, loss_of, images, labels):
        self.torch, self.dist, self.ddp_lab, self.world_size = torch, dist, ddp_lab, world_size
        self.make_network, self.loss_of, self.images, self.labels = make_network, loss_of, images, labels

    def of_one_process(self, *steps):
        """The parameters of one process with all ranks' pieces; a step is (first piece, last piece, learning rate)."""
        alone = self.make_network(32)
        for first, last, rate in steps:
            alone.zero_grad()
            part = slice(first * 16 * self.world_size, last * 16 * self.world_size)
            self.loss_of(alone(self.images[part]), self.labels[part]).backward()
            self.torch.optim.SGD(alone.parameters(), lr=rate).step()
        return self.torch.nn.utils.parameters_to_vector(alone.parameters())

    def by(self, train):
        """The number of backwards of `train(model, optimizer)` that synchronised, and the parameters after it."""

        def count(state, bucket):
            synced.append(bucket.is_last())
            work = self.dist.all_reduce(bucket.buffer() / self.world_size, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        model, synced = self.ddp_lab.DistributedDataParallel(self.make_network(32)), []
        model.register_comm_hook(None, count)
        train(model, self.torch.optim.SGD(model.parameters(), lr=0.1))
        return sum(synced), self.torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def long_iterations(rounds):
    """Of each four iterations, the one that is long in the round with the least noise."""
    shortest = numpy.min([one[4] for one in rounds], axis=0).reshape(2, 4).min(axis=0)
    longest = int(shortest.argmax())
    if shortest[longest] < 1.1 * numpy.median(shortest):
        return _NONE_STANDS_OUT
    return {0: "the first of each four", 3: "the last of each four"}.get(longest, _NONE_STANDS_OUT)


def training_that_fails(curves):
    small, large = (numpy.mean(by_every[8][-4:]) > 2 * numpy.mean(by_every[1][-4:]) for by_every in curves.values())
    return {
        (True, True): "both",
        (True, False): "the one with small batches",
        (False, True): "the one with large batches",
        (False, False): "neither",
    }[bool(small), bool(large)]


def fourth_backward(lab):
    if "uneven" not in lab.results:
        return "Not yet: run the cell above first."
    failures = lab.results["uneven"].failures
    if 0 not in failures:
        return "it uses its own gradient"
    interrupted = failures[0].name in ("KeyboardInterrupt", "Timeout")
    return "it waits until it is interrupted" if interrupted else "it raises an error"


def gradient_after_join(rank, joined):
    return f"{joined[3]:g}" if rank == 0 else ""


_NONE_STANDS_OUT = "none stands out"

check = Checks(on_ranks(accumulated), on_ranks(whole_epoch))

predictions = Predictions(
    Prediction(["the first of each four", "the last of each four", _NONE_STANDS_OUT], long_iterations),
    Prediction(["the one with small batches", "the one with large batches", "both", "neither"], training_that_fails),
    Prediction(["it uses its own gradient", "it raises an error", "it waits until it is interrupted"], fourth_backward),
    Prediction(["1", "0.5", "0"], gradient_after_join, on_ranks=True),
)
predict, compare = predictions.predict, predictions.compare
