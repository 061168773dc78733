"""Checks of lesson 14."""

from itertools import pairwise

from . import Checks, Prediction, Predictions, on_ranks


def late_rank_and_cause(places, late_rank, where, cause):
    if where not in places or cause not in ("batch", "forward", "optimizer"):
        return "Not yet: set where to one of places, and cause to one of the three parts that were measured."
    if late_rank != 1:
        return f"Not yet: it is not rank {late_rank}. For which rank did the others wait, according to the summary?"
    if where != "before its backward":
        return f"Not yet: rank 1 is right, but it is not late {where}. Which sentence of the summary says where?"
    if cause != "batch":
        return f"Not yet: rank 1's {cause} takes about as long as rank 0's. Which part takes many times as long?"
    return "Right: rank 1 starts its backward late in every step, because its next batch takes so long to read."


def loader(torch, rank, Batches, disk, encode):
    text, made = disk.read(rank), Batches(disk, rank)
    before, found = disk.reads, []
    for _ in range(3):
        found.append(made.next())
    if disk.reads > before:
        return "Not yet: the disk is still read when a batch is drawn. Read it in the constructor."
    if any(inputs.shape != (8, 48) or wanted.shape != (8, 48) for inputs, wanted in found):
        return "Not yet: a batch should still be two tensors of shape (8, 48)."
    if torch.equal(found[0][0], found[1][0]):
        return "Not yet: every batch is the same. Read the text once, but draw new pieces of it each time."
    tokens, draw = encode(text), torch.Generator().manual_seed(rank)
    for inputs, wanted in found:
        pieces = tokens[torch.randint(len(tokens) - 48, (8, 1), generator=draw) + torch.arange(49)]
        if not torch.equal(inputs, pieces[:, :-1]) or not torch.equal(wanted, pieces[:, 1:]):
            return "Not yet: the batches have changed. Each rank should draw the same pieces of its own text as before."
    return "Right: the disk is read once, and the batches are the same as before."


def fix_of_buckets(runs, wire, foreseen, fix, limit_mb):
    larger = min(foreseen[name] for name in foreseen if name.endswith("MiB"))
    if fix not in ("half the bytes", "every second step", "larger buckets"):
        return "Not yet: set fix to one of the three changes."
    if fix != "larger buckets":
        return (
            f"Not yet: with {fix} the simulated step takes {foreseen[fix]:.0f} ms, with larger buckets {larger:.0f}. "
            "Which cost is larger, that of the bytes or that of each collective?"
        )
    if not isinstance(limit_mb, int | float) or not limit_mb > 0:
        return "Not yet: limit_mb should be a positive number of MiB."
    tried = runs["read once"].simulate(wire, bucket_cap_mb=limit_mb)
    count = len(tried.prediction.buckets)
    if tried.step_ms > 1.2 * larger:
        small = f"there are still {count} collectives" if count > 2 else "nothing is sent before the backward is over"
        return f"Not yet: with {limit_mb:g} MiB the simulated step takes {tried.step_ms:.0f} ms: {small}."
    return f"Right: {count} buckets instead of 56. The simulated step takes {tried.step_ms:.0f} ms."


def unused_head(torch, unused, make_network, options):
    if {str(name) for name in unused} != {"word_head.weight", "word_head.bias"}:
        return "Not yet: unused should hold the full names of the two parameters that the findings name."
    network = make_network()
    if not isinstance(network, torch.nn.Module):
        return "Not yet: make_network should return the network."
    frozen = [name for name, one in network.named_parameters() if not one.requires_grad and name not in unused]
    if frozen:
        return f"Not yet: {frozen[0]} no longer learns, although the forward uses it."
    network(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    if any(one.requires_grad and one.grad is None for one in network.parameters()):
        return "Not yet: make_network returns a network whose head still requires gradients, so that it is still sent."
    if options.get("find_unused_parameters"):
        return "Not yet: the head is no longer sent. What is find_unused_parameters=True good for now?"
    return "Right: every parameter that is sent has a gradient, so DDP need not search for unused ones."


def report_numbers(step_ms, speed_up, largest):
    times = list(step_ms.values())
    wanted = times[0] / times[-1]
    if not isinstance(speed_up, int | float):
        return "Not yet: speed_up should be a number."
    if abs(speed_up * wanted - 1) < 0.01:
        return "Not yet: speed_up is upside down. A training that has become faster has a number above 1."
    if abs(speed_up / wanted - 1) > 0.01:
        return "Not yet: divide the first run's step by the last run's."
    differences = [before - after for before, after in pairwise(times)]
    saved = dict(zip(("loader", "buckets", "head"), differences, strict=True))
    if largest not in saved:
        return 'Not yet: largest should be "loader", "buckets" or "head".'
    if largest != max(saved, key=saved.get):
        return f"Not yet: that fix has saved {saved[largest]:.0f} ms. Compare the differences between consecutive runs."
    return f"Right: {wanted:.1f} times as fast, and {saved[largest]:.0f} ms of the difference come from one fix."


def equal_steps(by_rank):
    return "yes, by more than a tenth" if max(by_rank) > 1.1 * min(by_rank) else "no, they take equally long"


def shorter_step(comparison):
    step = comparison.step
    if step.b_ms < 100:
        return _AS_LAST_WEEK
    return "by half of that: one of two ranks is faster" if -step.change_ms < 0.75 * _READING_MS else "by all of that"


def best_change(foreseen):
    step_ms = {name: foreseen[name] for name in ("half the bytes", "every second step")}
    step_ms["larger buckets"] = min(foreseen[name] for name in foreseen if name.endswith("MiB"))
    return min(step_ms, key=step_ms.get)


def without_the_option(message):
    failed = message.startswith("step 2: ")
    return "the second step ends with an error" if failed else "the same training, a little faster"


def same_loss(losses):
    first, last = losses["as found"], losses["no unused head"]
    if abs(last / first - 1) < 0.01:
        return "the same, except for the last digits"
    return "it is lower" if last < first else "it is higher"


_READING_MS = 900  # see SLOW_MS of training_parts, which needs torch
_AS_LAST_WEEK = "by more: it takes 50 ms again, as last week"

check = Checks(late_rank_and_cause, on_ranks(loader), fix_of_buckets, on_ranks(unused_head), report_numbers)

predictions = Predictions(
    Prediction(["yes, by more than a tenth", "no, they take equally long"], equal_steps),
    Prediction(["by half of that: one of two ranks is faster", "by all of that", _AS_LAST_WEEK], shorter_step),
    Prediction(["half the bytes", "every second step", "larger buckets"], best_change),
    Prediction(
        ["the same training, a little faster", "the second step ends with an error"], without_the_option, on_ranks=True
    ),
    Prediction(["the same, except for the last digits", "it is lower", "it is higher"], same_loss),
)
predict, compare = predictions.predict, predictions.compare
