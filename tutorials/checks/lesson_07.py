"""Checks of lesson 7."""

from . import Checks, on_ranks


def two_heads(torch, dist, world_size, device, cross_entropy, scans, labels, TwoHeads, make_model, loss):
    def in_turns(outputs, number):
        return cross_entropy(outputs[number % 2], labels % 2 if number % 2 else labels)

    def gradients(network, number, loss):
        network.zero_grad()
        loss(network(scans), number).backward()
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
        alone = gradients(TwoHeads().to(device), number, in_turns)
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


check = Checks(on_ranks(two_heads), on_ranks(repeated_layer))
