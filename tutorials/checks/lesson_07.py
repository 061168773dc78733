"""Checks and predictions of lesson 7."""

from . import Checks, Prediction, Predictions, on_ranks


def two_heads(torch, dist, world_size, device, cross_entropy, images, labels, TwoHeads, make_model, loss):
    def alternately(outputs, number):
        return cross_entropy(outputs[number % 2], labels % 2 if number % 2 else labels)

    def gradients(network, number, loss):
        network.zero_grad()
        loss(network(images), number).backward()
        named = network.named_parameters()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}

    model = make_model()
    frozen = [name for name, parameter in model.module.named_parameters() if not parameter.requires_grad]
    if frozen:
        return (
            f"Not yet: {frozen[0]} is frozen, so it never learns. Let DDP find the parameters that a step does not use."
        )
    try:
        found = [gradients(model, number, loss) for number in range(4)]
    except RuntimeError as error:
        if "graph has changed" in str(error):
            return "Not yet: static_graph promises that all steps are alike, but the loss alternates between the heads."
        if "finished reduction" in str(error):
            return "Not yet: the error is still there. In each step one head is unused; tell DDP to look for it."
        return f"Not yet: there is a different error now: {error}"
    for number, mine in enumerate(found):
        alone = gradients(TwoHeads().to(device), number, alternately)
        for (name, one), other in zip(mine.items(), alone.values(), strict=True):
            dist.all_reduce(other)
            if not torch.allclose(one, other / world_size, atol=1e-5):
                told = f"in step {number} the gradient of {name} is not the average over the ranks"
                return f"Not yet: {told}. Does the loss still alternate between the heads, and does DDP average?"
    return "Right: the heads learn alternately, and each step's gradients are the averages."


def repeated_layer(torch, dist, world_size, device, Repeated, repeated, step):
    calls, alone = [], Repeated().to(device)
    hook = repeated.module.block.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    try:
        for _ in range(3):
            calls.clear()
            step(repeated)
    except RuntimeError as error:
        hint = "Use another kind of checkpoint, or a promise to DDP." if "ready only once" in str(error) else ""
        return f"Not yet: {str(error).split('. ')[0]}. {hint}"
    finally:
        hook.remove()
    step(alone)
    for (name, mine), other in zip(repeated.module.named_parameters(), alone.parameters(), strict=True):
        dist.all_reduce(other.grad)
        if not torch.allclose(mine.grad, other.grad / world_size, atol=1e-5):
            return f"Not yet: it trains, but the gradient of {name} is not the average over the ranks."
    if len(calls) < 6:
        told = f"block ran {len(calls)} times a step. With three checkpoints it runs 3 + 3 times"
        return f"Not yet: the gradients are right, but {told}."
    return "Right: block runs 3 + 3 times a step, and all gradients are the averages."


def failing_step(finished):
    return ["the first one", "the second one", "the third one", _NO_STEP][finished]


def failing_ranks(lab):
    if "one-rank" not in lab.results:
        return _RUN_FIRST
    failed = sorted(lab.results["one-rank"].failures)
    return {(0,): "rank 0", (1,): "rank 1", (): "neither"}.get(tuple(failed), "both ranks")


def ranks_with_a_gradient(torch, dist, device, world_size, norms):
    mine = norms["rank 0 uses it"]
    mine = torch.tensor(float("nan") if mine is None else mine, device=device)
    of_ranks = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(of_ranks, mine)
    if of_ranks[1].isnan():
        return "only rank 0"
    same = torch.allclose(of_ranks[0], of_ranks[1])
    return "both ranks, with the same gradient" if same else "both ranks, with different gradients"


def broken_promise(lab):
    if "broken-promise" not in lab.results:
        return _RUN_FIRST
    failures = lab.results["broken-promise"].failures.values()
    if not failures:
        return "the gradients of extra are averaged as usual"
    named = any("graph has changed" in each.message and "extra." in each.message for each in failures)
    return _NAMED if named else "the ranks hang"


def complete_block(torch, wrap, step, device):
    """When DDP takes a gradient as complete that arrives three times: at the last arrival before its error."""
    checkpoint = torch.utils.checkpoint.checkpoint

    class Repeated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = (torch.nn.Linear(64, width) for width in (64, 64, 10))

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = checkpoint(self.block, torch.tanh(x), use_reentrant=True)
            return self.last(x)

    arrived, model = [], wrap(Repeated())
    model.module.block.weight.register_post_accumulate_grad_hook(arrived.append)
    try:
        step(model)
    except RuntimeError as error:
        if "ready only once" not in str(error):
            raise
    return "when it arrives for the third time" if len(arrived) == 3 else "when it arrives for the first time"


def way_that_differs(averaged):
    ways = {
        "sum_of_losses": "one backward of the sum",
        "two_backwards": "two separate backwards",
        "no_sync": "the first part inside no_sync()",
    }
    return next((ways[way] for (package, way), right in averaged.items() if package == "torch" and not right), _NO_WAY)


_RUN_FIRST = "Not yet: run the cell above first."
_NO_STEP = "none: DDP ignores unused parameters"
_NO_WAY = "none: all three are averaged"
_NAMED = "an error names a parameter of extra"

check = Checks(on_ranks(two_heads), on_ranks(repeated_layer))

predictions = Predictions(
    Prediction(["the first one", "the second one", _NO_STEP], failing_step, on_ranks=True),
    Prediction(["rank 0", "rank 1", "both ranks", "neither"], failing_ranks),
    Prediction(
        ["only rank 0", "both ranks, with different gradients", "both ranks, with the same gradient"],
        ranks_with_a_gradient,
        on_ranks=True,
    ),
    Prediction(["the gradients of extra are averaged as usual", "the ranks hang", _NAMED], broken_promise),
    Prediction(
        ["when it arrives for the first time", "when it arrives for the third time"], complete_block, on_ranks=True
    ),
    Prediction(
        ["one backward of the sum", "two separate backwards", "the first part inside no_sync()", _NO_WAY],
        way_that_differs,
        on_ranks=True,
    ),
)
predict, compare = predictions.predict, predictions.compare
