"""Checks of lesson 4, and its pictures."""

import os
import time

import numpy as np

import ddp_lab

from . import Checks, Prediction, Predictions, on_ranks

KINDS = ("rows", "columns", "checks", "disc", "cross")
_NEW_ORDER = "it has a new order, and each picture once"
_OVERLAP = "it has a new order, and some pictures are on both ranks"
_MORE = "more than these, such as the random state"


def draw(count, seed):
    """Draws pictures: two colours in one of five patterns, with noise.

    Returns:
        The pictures, float32 of (count, 3, 32, 32), and the number of each one's pattern in `KINDS`.
    """
    dice = np.random.default_rng(seed)
    kinds = dice.integers(len(KINDS), size=count)
    middle_x, middle_y = dice.uniform(-5, 5, (2, count, 1, 1))
    size = dice.uniform(4, 6, (count, 1, 1))
    rows, columns = np.mgrid[-15.5:16, -15.5:16]
    x, y = (columns - middle_x) / size, (rows - middle_y) / size
    stripes_x, stripes_y = np.sin(np.pi * x) > 0, np.sin(np.pi * y) > 0
    disc, cross = np.hypot(x, y) < 1.8, (abs(x) < 0.6) | (abs(y) < 0.6)
    patterns = np.stack([stripes_y, stripes_x, stripes_x ^ stripes_y, disc, cross])
    light, dark = dice.uniform(0.5, 1, (count, 3, 1, 1)), dice.uniform(0, 0.5, (count, 3, 1, 1))
    pictures = np.where(patterns[kinds, np.arange(count)][:, None], light, dark)
    return (pictures + dice.normal(0, 0.3, pictures.shape)).astype(np.float32), kinds


def show(pictures, kinds):
    """The first pictures as a figure."""
    import plotly.express

    shown = 10
    images = (255 * pictures[:shown].clip(0, 1)).astype(np.uint8).transpose(0, 2, 3, 1)
    figure = plotly.express.imshow(images, facet_col=0, facet_col_wrap=shown)
    for title, kind in zip(figure.layout.annotations, kinds, strict=False):
        title.text = KINDS[kind]
    figure.update_xaxes(visible=False).update_yaxes(visible=False).update_traces(hoverinfo="skip", hovertemplate=None)
    return figure.update_layout(height=170, margin={"t": 40, "b": 10, "l": 10, "r": 10})


def own_data(batches, train_set, dist, rank):
    def epoch_of(number):
        found = list(batches(number))
        return [int(one) for batch in found for one in batch[2]], [float(one) for batch in found for one in batch[3]]

    numbers, factors = zip(*map(epoch_of, (0, 1)), strict=True)
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, (numbers, factors))
    others = [one for place, one in enumerate(every_rank) if place != rank]
    if any(set(numbers[0]) & set(other[0][0]) for other in others):
        return "Not yet: ranks have the same pictures in one epoch. Pass a DistributedSampler to the loader."
    if sum(len(one[0][0]) for one in every_rank) != len(train_set):
        return "Not yet: the ranks together do not have every picture once in an epoch."
    if numbers[0] == numbers[1]:
        return "Not yet: epoch 1 has the order of epoch 0. Tell the sampler the epoch before the loader starts."
    if any(factors[0][:8] == other[1][0][:8] for other in others):
        return "Not yet: ranks draw the same factors for their pictures. The seed must depend on the rank."
    if factors[0][:8] == factors[1][:8]:
        return "Not yet: epoch 1 has the factors of epoch 0. The seed must depend on the epoch, too."
    if any(factors[1][:8] == other[1][0][:8] for other in others):
        return "Not yet: a rank draws the factors that another one had an epoch earlier. Use each seed only once."
    if epoch_of(1) != (numbers[1], factors[1]):
        return "Not yet: a second call for the same epoch gives other batches, so no training can be repeated."
    return "Right: in each epoch the ranks share the pictures in a new order, and each draws its own factors."


def clipped_step(step, make_network, train_set, loss_of, flat_weights, torch, dist, device, rank, world_size):
    limit, own = 0.1, train_set.tensors[1] == rank % len(KINDS)  # so that the ranks' gradients differ much
    images, kinds = train_set.tensors[0][own][:32].to(device), train_set.tensors[1][own][:32].to(device)

    def change(optimize):
        network = make_network()
        before = flat_weights(network)
        optimize(network, torch.optim.SGD(network.parameters(), lr=1.0))
        return flat_weights(network) - before

    class Scaler(torch.amp.GradScaler):
        updated = False

        def update(self, *arguments):
            self.updated = True
            super().update(*arguments)

    scaler = Scaler(device.type)

    def readers_step(network, optimizer):
        step(ddp_lab.DistributedDataParallel(network), optimizer, scaler, images, kinds, limit)

    def unclipped(network, optimizer):
        loss_of(network(images), kinds).backward()
        for parameter in network.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()

    full, made = change(unclipped), change(readers_step)
    wanted = full * (limit / full.norm()).clamp(max=1)
    length, cosine = float(made.norm()), float(torch.nn.functional.cosine_similarity(made, full, dim=0))
    turned = cosine < 0.9  # a tiny step has rounding errors, too
    if float((made - wanted).norm()) < 0.01 * limit and not scaler.updated:
        return "Not yet: the step is right, but the scale stays as it is. Call scaler.update() after scaler.step()."
    if float((made - wanted).norm()) < 0.01 * limit:
        return f"Right: a step of length {length:.3f}, in the direction of the averaged gradients."
    if length == 0:
        return "Not yet: the weights have not changed."
    found = f"Not yet: with another batch, a step of length {length:.3g} and cosine {cosine:.2f}."
    if length < 0.01 * limit:
        also = " The direction is wrong, too: clip after the average, all together." if turned else ""
        return f"{found} The gradients were clipped while they were scaled.{also}"
    if length > 1.01 * limit:
        return f"{found} Clip all gradients together." if turned else f"{found} Nothing was clipped before the step."
    return f"{found} Were gradients clipped before the average?"


def counted_accuracy(evaluate, torch, dist, device, world_size):
    count, kinds_of = 133, torch.arange(133) % len(KINDS)
    right = torch.rand(count, generator=torch.Generator().manual_seed(5)) < 0.7
    right[0], right[-1] = False, True
    guesses = torch.where(right, kinds_of, (kinds_of + 1) % len(KINDS))
    images = torch.zeros(count, 3, 32, 32)
    images[:, 0, 0, 0] = guesses.float()

    class Guesser(torch.nn.Module):
        seen = 0

        def forward(self, pictures):
            self.seen += len(pictures)
            return torch.nn.functional.one_hot(pictures[:, 0, 0, 0].long(), len(KINDS)).float()

    guesser = Guesser()
    dataset = torch.utils.data.TensorDataset(images, kinds_of, torch.arange(count))
    answers = [None] * world_size
    dist.all_gather_object(answers, (evaluate(guesser, dataset), guesser.seen))
    accuracies, seen = [float(one) for one, _ in answers], sum(number for _, number in answers)
    exact = max(abs(one - float(right.float().mean())) for one in accuracies) < 1e-6
    if max(accuracies) - min(accuracies) > 1e-6:
        return "Not yet: each rank returns another accuracy. Add up over the ranks what each has counted."
    if seen > count + world_size:
        return f"Not yet: {seen} pictures were evaluated, of the check's set of {count}. Give each rank its own part."
    if seen < count:
        return f"Not yet: only {seen} pictures of the check's set of {count} were evaluated."
    if seen > count and not exact:
        return f"Not yet: {seen} pictures were evaluated, of the check's set of {count}. The sampler repeats some."
    if not exact:
        return "Not yet: a mean of means. Add up right answers and pictures, and divide at the end."
    return f"Right: in the check's set of {count} pictures, each counts once, on whichever rank it is."


def checkpoint(save, load, make_network, sgd, train, batches, flat_weights, torch, dist, rank, folder):
    model = ddp_lab.DistributedDataParallel(make_network())
    optimizer = sgd(model)
    train(model, optimizer, lambda epoch: [next(iter(batches(epoch)))], range(2))
    path = [f"{folder}/check-{time.monotonic_ns()}.pt"]
    dist.broadcast_object_list(path)
    [path] = path
    problem = _problem_of_saving(lambda: save(path, model, optimizer, 1), path, torch, dist, rank)
    if problem:
        return problem
    network = make_network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    restored = sgd(network)
    try:
        following = load(path, network, restored)
    except RuntimeError as error:
        if "module." not in str(error):
            raise
        return "Not yet: the file has keys that begin with `module.`, so save the state of model.module."
    if not torch.equal(flat_weights(network), flat_weights(model)):
        return "Not yet: the network does not have the saved weights."
    if not _same_momentum(optimizer, restored, torch):
        return "Not yet: the optimizer starts without its momentum. Save and load its state_dict(), too."
    if following != 2:
        return f"Not yet: after epoch 1 was saved, load returns {following}. The next epoch is 2."
    return "Right: one rank writes, all ranks wait for the file, and it holds all that the training needs."


def _problem_of_saving(save, path, torch, dist, rank):
    """Saves, where rank 0 is slow to write; says which rank writes or returns when it must not, else ""."""
    original, writers = torch.save, []

    def slow_save(*args, **options):
        writers.append(rank)
        end = time.monotonic() + 3
        while rank == 0 and time.monotonic() < end and not os.path.exists(f"{path}.returned"):
            time.sleep(0.02)
        original(*args, **options)

    torch.save = slow_save
    try:
        dist.barrier()
        save()
        exists = os.path.exists(path)
        if rank:
            open(f"{path}.returned", "w").close()
    finally:
        torch.save = original
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (writers, exists))
    wrote = [number for numbers, _ in answers for number in numbers]
    if wrote != [0]:
        ranks = ", ".join(map(str, wrote)) or "none"
        return f"Not yet: the ranks that write the file are {ranks}. Rank 0 alone should write it, once."
    if not all(exists for _, exists in answers):
        return "Not yet: a rank returned from save before the file existed. Let all ranks wait for rank 0."
    return ""


def _same_momentum(one, other, torch):
    buffers = [
        [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()] for optimizer in (one, other)
    ]
    return len(buffers[0]) == len(buffers[1]) and all(map(torch.equal, *buffers))


def made_by_naive_ranks(naive, one_process, flat_weights, largest_difference, dist):
    mine = flat_weights(naive)
    first = mine.clone()
    dist.broadcast(first, src=0)
    if largest_difference(mine, first) > 1e-3:
        return "two networks that differ"
    same = largest_difference(mine, flat_weights(one_process)) < 1e-3
    return "the network of one process" if same else "a better network: it saw twice as many pictures"


def second_epoch(forgotten, dist, world_size):
    first, second, *_ = forgotten
    every_rank = [None] * world_size
    dist.all_gather_object(every_rank, second)
    if first == second:
        return "it has the order of the first epoch"
    return _NEW_ORDER if not set.intersection(*map(set, every_rank)) else _OVERLAP


def equal_training(differences):
    return min(differences, key=differences.get)


def damaged_ranks(finite, dist):
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, finite["own loss"])
    damaged = [rank for rank, intact in enumerate(every_rank) if not intact]
    return "on both ranks" if len(damaged) > 1 else f"on rank {damaged[0]} only" if damaged else "on no rank"


def pictures_counted(test_set, DistributedSampler, world_size):
    sampled = world_size * len(DistributedSampler(test_set, shuffle=False))
    return {261: "261, each once", 262: "262, one of them twice", 522: "522, each on both ranks"}[sampled]


def enough_to_resume(distances, batches):
    first, second = (next(iter(batches(epoch)))[2].tolist() for epoch in (0, 1))
    if first == second:
        return "Not yet: all epochs have the same batches. Solve exercise 1 first, and run the cell above again."
    return next((name for name, distance in distances.items() if distance < 1e-3), _MORE)


check = Checks(on_ranks(own_data), on_ranks(clipped_step), on_ranks(counted_accuracy), on_ranks(checkpoint))

predictions = Predictions(
    Prediction(
        [
            "a better network: it saw twice as many pictures",
            "the network of one process",
            "two networks that differ",
        ],
        made_by_naive_ranks,
        on_ranks=True,
    ),
    Prediction(
        [_NEW_ORDER, _OVERLAP, "it has the order of the first epoch"],
        second_epoch,
        on_ranks=True,
    ),
    Prediction(
        [
            "64 pictures per rank, the same learning rate",
            "64 pictures per rank, twice the learning rate",
            "32 pictures per rank, the same learning rate",
        ],
        equal_training,
        on_ranks=True,
    ),
    Prediction(["on no rank", "on rank 0 only", "on rank 1 only", "on both ranks"], damaged_ranks, on_ranks=True),
    Prediction(
        ["261, each once", "262, one of them twice", "522, each on both ranks"], pictures_counted, on_ranks=True
    ),
    Prediction(
        ["weights", "weights, optimizer", "weights, optimizer, epoch", _MORE],
        enough_to_resume,
        on_ranks=True,
    ),
)
predict, compare = predictions.predict, predictions.compare
