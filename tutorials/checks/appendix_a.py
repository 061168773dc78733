"""Checks of appendix A, and its figures."""

import threading

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from . import Checks, Prediction, Predictions, on_ranks

_STEPS = {
    "scatter": "#009E73",
    "replicate": "#E69F00",
    "parallel_apply": "#56B4E9",
    "gather": "#CC79A7",
    "forward": "#0072B2",
}


def steps_of_a_forward(notes):
    """A bar for each step, in the row of its thread.

    Args:
        notes: (step, thread, begin, end) of each, in seconds.
    """
    began = min(begin for _, _, begin, _ in notes)
    figure = go.Figure(layout={"template": "plotly_white", "height": 260, "barmode": "overlay", "margin": {"t": 40}})
    title = "One forward of DataParallel: three threads of one process"
    figure.update_layout(title=title, xaxis_title="ms since it began")
    for step, colour in _STEPS.items():
        found = [(thread, begin, end) for name, thread, begin, end in notes if name == step]
        figure.add_bar(
            name=step,
            y=[thread for thread, _, _ in found],
            base=[(begin - began) * 1000 for _, begin, _ in found],
            x=[(end - begin) * 1000 for _, begin, end in found],
            orientation="h",
            width=0.6,
            marker={"color": colour},
        )
    figure.update_yaxes(categoryorder="array", categoryarray=["replica-1", "replica-0", "MainThread"])
    return figure


def bars(measured):
    """A stacked bar of forward and backward for each network and way to train it.

    Args:
        measured: network -> way -> milliseconds of forward and backward.
    """
    figure = make_subplots(1, len(measured), subplot_titles=list(measured))
    for column, ways in enumerate(measured.values(), start=1):
        for index, (part, colour) in enumerate({"forward": "#0072B2", "backward": "#E69F00"}.items()):
            heights = [times[index] for times in ways.values()]
            look = {"showlegend": column == 1, "marker": {"color": colour}}
            figure.add_bar(name=part, x=list(ways), y=heights, row=1, col=column, **look)
    figure.update_yaxes(title="ms a step (shortest of nine)", rangemode="tozero")
    return figure.update_layout(template="plotly_white", barmode="stack", height=340, margin={"t": 40})


def forward(torch, ddp_lab, Reader, images, forward_by_hand):
    network, seen = Reader(), []
    network.register_forward_pre_hook(lambda module, inputs: seen.append((module, threading.current_thread().name)))
    model = ddp_lab.DataParallel(network, device_ids=["cpu:0", "cpu:1"])
    model.forward = lambda x: x  # its own one, which is to be written here
    output = forward_by_hand(model, images)
    if not seen:
        return "Not yet: the network did not run. Don't call `model`: use its four methods instead of its forward."
    modules, threads = {id(module) for module, _ in seen}, sorted(thread for _, thread in seen)
    if threads == ["MainThread"]:
        return (
            "Not yet: the network ran once, in the main thread. Start with model.scatter((x,), {}, model.device_ids)."
        )
    if "MainThread" in threads:
        return "Not yet: the network ran twice, but in the main thread, one after the other. Use model.parallel_apply."
    if len(modules) < 2:
        return (
            "Not yet: both threads ran the same module. On GPUs its parameters would be on only one device: "
            "replicate it."
        )
    if not torch.is_tensor(output):
        return (
            f"Not yet: this returns a {type(output).__name__} of {len(output)}. Gather the outputs on "
            "model.output_device."
        )
    if len(output) != len(images):
        return (
            f"Not yet: there are {len(output)} outputs for {len(images)} images. Is each replica called with its own "
            "part?"
        )
    if not torch.allclose(output, Reader()(images), atol=1e-5):
        return "Not yet: the numbers differ from the network's own. Are all parts there, in their order?"
    return "Right: two replicas, two threads, one output. You have written DataParallel."


def place_of_the_gradient(original, copied):
    places = original.grad is not None, copied.is_leaf and copied.grad is not None
    return {(True, False): "in the original network", (False, True): "in the replica", (True, True): "in both"}[places]


def images_counted(counting):
    return str(counting.module.seen)


def slowed_down(measured):
    slower = [name for name, ways in measured.items() if ways["DataParallel"][0] > ways["as it is"][0]]
    if len(slower) == 1:
        return f"for {slower[0]}"
    return "for both" if slower else "for neither"


check = Checks(on_ranks(forward, ranks=[0]))

predictions = Predictions(
    Prediction(["in the original network", "in the replica", "in both"], place_of_the_gradient, on_ranks=True),
    Prediction(["0", "96", "192"], images_counted, on_ranks=True),
    Prediction(["for Reader", "for PixelByPixel", "for both", "for neither"], slowed_down),
)
predict, compare = predictions.predict, predictions.compare
