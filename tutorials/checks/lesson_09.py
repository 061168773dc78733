"""Checks and predictions of lesson 9."""

from . import Checks, Prediction, Predictions, on_ranks


def sends_bfloat16(torch, ddp_lab, bf16):
    report = ddp_lab.check_hook(bf16, dtypes=[torch.float32], steps=0, in_flight=1)
    if report.problems:
        return f"Not yet: {report.problems[0]}"
    largest = report.buckets[3]
    sent = largest.payload_bytes / largest.numel
    if sent != 2:
        return (
            f"Not yet: {sent:g} bytes are sent for each gradient. Convert before the all_reduce: .to(torch.bfloat16)."
        )
    if largest.error < 6e-4:
        told = f"an error of {largest.error:.0e} is float16's. A bfloat16 is coarser and has a larger range"
        return f"Not yet: 2 bytes, but {told}."
    return (
        f"Right: half of the bytes, an error of {largest.error:.1e}, and no gradient is too large or too small for it."
    )


def error_feedback(torch, dist, ddp_lab, rank, world_size, top_k_later):
    model, state, steps = ddp_lab.DistributedDataParallel(torch.nn.Linear(60, 50, bias=False)), {}, 6
    model.register_comm_hook(state, top_k_later)
    dice, exact, arrived = torch.Generator().manual_seed(rank), 0, 0
    for _ in range(steps):
        model.zero_grad()
        gradient = torch.randn(50, 60, generator=dice)
        (model(torch.eye(60)) * gradient.T).sum().backward()  # the weight's gradient is `gradient`
        exact, arrived = exact + gradient / world_size, arrived + model.module.weight.grad
    sent = int((model.module.weight.grad != 0).sum())
    kept = sum(rest.view(50, 60) for rest in state.values()) / world_size if state else torch.zeros(50, 60)
    for tensor in (exact, kept):
        dist.all_reduce(tensor)
    missing = float((exact - arrived - kept).norm() / exact.norm())
    if not state:
        return "Not yet: the state is empty, so nothing is remembered."
    if set(state) != {0}:
        told = f"the keys of the state are {list(state)}. A model with several buckets needs a rest of each one"
        return f"Not yet: {told}: use bucket.index()."
    if sent > 6 * world_size:
        return f"Not yet: {sent} gradients were sent; 0.2 % of 3000 on each rank is {6 * world_size} at most."
    if missing > 1e-4:
        return (
            f"Not yet: the sent and the remembered gradients differ from all gradients by {missing:.0%}. Is the old "
            "rest added first? Is a *copy* kept (top_k overwrites the buffer), with zeros at the positions that are "
            "sent?"
        )
    return (
        f"Right: after {steps} steps, the sent and the remembered gradients are all gradients. None is lost, some are "
        "late."
    )


def fp16_error(fp16_report):
    error = fp16_report.buckets[3].error
    return "more than 1 %" if error > 1e-2 else "between 0.1 % and 1 %" if error > 1e-3 else "less than 0.1 %"


def unsent_gradient(top_k_report):
    largest = top_k_report.buckets[3]
    if largest.error < 0.5:
        return "it changes a little in each step"
    never = largest.accumulated_error > 0.9 * largest.error
    return "it never changes" if never else "it changes in a later step"


def accuracy_of_few_bytes(found):
    share = found["top 0.2 %, the rest later"][1] / found["plain average"][1]
    return (
        "about as accurate" if share > 0.85 else "about half as accurate" if share > 0.3 else "no better than guessing"
    )


def after_gossip(drift):
    return "no, they differ" if drift > 1e-4 else "yes, except for the last digits" if drift > 0 else "yes, exactly"


def shortest_step(medians):
    fastest = min(medians, key=medians.get)
    return _NO_HOOK if fastest == "none" else fastest


_NO_HOOK = "none: without a hook it is shortest"

check = Checks(on_ranks(sends_bfloat16), on_ranks(error_feedback))

predictions = Predictions(
    Prediction(["more than 1 %", "between 0.1 % and 1 %", "less than 0.1 %"], fp16_error, on_ranks=True),
    Prediction(
        ["it changes a little in each step", "it changes in a later step", "it never changes"],
        unsent_gradient,
        on_ranks=True,
    ),
    Prediction(["about as accurate", "about half as accurate", "no better than guessing"], accuracy_of_few_bytes),
    Prediction(["yes, exactly", "yes, except for the last digits", "no, they differ"], after_gossip, on_ranks=True),
    Prediction(["fp16", "my bf16", "my top 0.2 %", _NO_HOOK], shortest_step),
)
predict, compare = predictions.predict, predictions.compare
