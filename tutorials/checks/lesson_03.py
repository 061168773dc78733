"""Checks of lesson 3."""

import queue
import threading
from datetime import timedelta

import plotly.graph_objects as go

from . import Checks, Prediction, Predictions, call_with_names, on_ranks


def chart(lines, x, x_title, y_title, title):
    """A figure with one line for each name, on logarithmic axes."""
    figure = go.Figure([go.Scatter(name=name, x=x, y=y, mode="lines+markers") for name, y in lines.items()])
    figure.update_xaxes(title=x_title, type="log", dtick=1).update_yaxes(title=y_title, type="log", dtick=1)
    return figure.update_layout(template="plotly_white", height=380, title=title, margin={"t": 50, "b": 50})


def passed_on(torch, dist, rank, world_size, pass_on):
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    outgoing, incoming = torch.full((4,), rank + 1.0), torch.zeros(4)
    try:
        pass_on(outgoing, incoming, group)
    except RuntimeError:
        return (
            "Not yet: the ranks still wait for each other until the timeout. At least one rank must not block in send."
        )
    before = (rank - 1) % world_size
    if torch.equal(incoming, torch.zeros(4)):
        return f"Not yet: nothing has arrived on rank {rank}. Is there a recv (or irecv and wait) into `incoming`?"
    if not torch.equal(incoming, torch.full((4,), before + 1.0)):
        return f"Not yet: rank {rank} should have received rank {before}'s {before + 1.0}, but has {incoming.tolist()}."
    return (
        "Right: all ranks send and receive at the same time. (Check once more: does each isend or irecv have its wait?)"
    )


def ring(torch, ring_all_reduce):
    for ranks, length in ((2, 6), (4, 10)):
        tensors, sent, raised = _play(torch, ring_all_reduce, ranks, length)
        begin = torch.arange(1.0, length + 1)
        wanted = begin * sum(10**place for place in range(ranks))
        if raised:
            return f"Not yet: with {ranks} ranks: {raised[0]}."
        if torch.equal(tensors[0], begin):
            return (
                "Not yet: the tensor is as it was. Start with the steps that add: pass a part on, add the part that "
                "arrives."
            )
        if not all(torch.equal(tensor, wanted) for tensor in tensors):
            if all((tensor == wanted).any() for tensor in tensors):
                return (
                    f"Not yet: with {ranks} ranks each has one finished part, but not all parts. Pass the finished "
                    "ones on."
                )
            found = f"rank 0 has {tensors[0].tolist()}, but the sum is {wanted.tolist()}"
            return f"Not yet: with {ranks} ranks {found}. Which part in which step?"
        if max(sent) > 2 * (ranks - 1) * -(-length // ranks):
            times = max(sent) / length
            return (
                f"Not yet: the sums are right, but a rank sent {times:.1f} times the buffer. Pass on single parts only."
            )
    return f"Right: each of {ranks} ranks sent {max(sent) / length:.2g} times the buffer."


def _play(torch, ring_all_reduce, ranks, length):
    """The ring between threads: each rank's tensor after it, how many elements each has sent, what was raised."""
    boxes, sent, raised = [queue.SimpleQueue() for _ in range(ranks)], [0] * ranks, []
    tensors = [torch.arange(1.0, length + 1) * 10**place for place in range(ranks)]

    def one(place):
        def pass_on(outgoing, incoming, group=None):
            sent[place] += outgoing.numel()
            boxes[(place + 1) % ranks].put(outgoing.clone())
            incoming.copy_(boxes[place].get(timeout=3))

        try:
            ring_all_reduce(tensors[place], place, ranks, pass_on)
        except queue.Empty:
            raised.append("a rank waits for a part that no rank passes on")
        except Exception as error:  # noqa: BLE001 (the reader's own, shown in the verdict)
            raised.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(place,)) for place in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tensors, sent, raised


def steps_and_bytes(animation):
    run = animation.shown
    return f"{len(run.steps)} step{'s' if len(run.steps) > 1 else ''}, {run.sent(0) // 1024} KiB"


def tagged_messages(lab):
    held = lab.pull("(first.item(), second.item())", ranks=[1])[1]
    return f"first is {held[0]:.0f}, second is {held[1]:.0f}"


def after_reduce_scatter(after):
    return after[1]["reduce_scatter"].removesuffix(", –")


def launched_alone(lab):
    if "async" not in lab.results:
        return "Not yet: run the cell above first."
    if lab.results["async"].failures:
        return "it waits for rank 1 to launch it too"
    [completed] = lab.pull("completed", ranks=[0]).values()
    return "it continues, and the collective is " + ("completed" if completed else "not completed")


def adds_up(torch, rank, world_size, ring_all_reduce, pass_on):
    tensor = torch.full((6,), 10.0**rank)
    ring_all_reduce(tensor, rank, world_size, pass_on)
    return bool((tensor == sum(10.0**other for other in range(world_size))).all())


def slower_by(lab, times):
    if not all(lab.run(call_with_names, adds_up).values.values()):
        return "Not yet: solve exercise 2 first."
    ratio = times["yours"][0] / times["dist.all_reduce"][0]
    return "less than 3 times" if ratio < 3 else "3 to 30 times" if ratio < 30 else "more than 30 times"


def shape_of_the_curve(pieces):
    first, best, last = pieces["gloo"][0], min(pieces["gloo"]), pieces["gloo"][-1]
    if first > 1.5 * best:
        return "it falls"
    return "it rises" if last > 1.5 * best else "it is flat"


check = Checks(on_ranks(passed_on), on_ranks(ring))

predictions = Predictions(
    Prediction(["1 step, 64 KiB", "2 steps, 64 KiB", "2 steps, 128 KiB"], steps_and_bytes),
    Prediction(["first is 1, second is 2", "first is 2, second is 1"], tagged_messages),
    Prediction(["30", "32", "30, 32", "41"], after_reduce_scatter),
    Prediction(
        [
            "it waits for rank 1 to launch it too",
            "it continues, and the collective is completed",
            "it continues, and the collective is not completed",
        ],
        launched_alone,
    ),
    Prediction(["less than 3 times", "3 to 30 times", "more than 30 times"], slower_by),
    Prediction(["it is flat", "it falls", "it rises"], shape_of_the_curve),
)
predict, compare = predictions.predict, predictions.compare
