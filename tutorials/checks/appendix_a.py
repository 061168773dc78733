"""Checks of lesson 4."""

import threading

from . import Checks, on_ranks


def forward(torch, ddp_lab, Reader, scans, forward_by_hand):
    network, seen = Reader(), []
    network.register_forward_pre_hook(lambda module, inputs: seen.append((module, threading.current_thread().name)))
    model = ddp_lab.DataParallel(network, device_ids=["cpu:0", "cpu:1"])
    model.forward = lambda x: x  # its own one, which is to be written here
    output = forward_by_hand(model, scans)
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
    if len(output) != len(scans):
        return (
            f"Not yet: there are {len(output)} outputs for {len(scans)} images. Is each replica called with its own "
            "part?"
        )
    if not torch.allclose(output, Reader()(scans), atol=1e-5):
        return "Not yet: the numbers differ from the network's own. Are all parts there, in their order?"
    return "Right: two replicas, two threads, one output. You have written DataParallel."


def counting(ddp_lab, scans, Counting):
    totals = []
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"], ["cpu"] * 4):
        model = ddp_lab.DataParallel(Counting(), device_ids=devices)
        for _ in range(3):
            model(scans[:64])
        totals.append(int(model.module.total()))
    told = f"on 1, 2 and 4 devices the totals are {totals}, and 3 x 64 = 192 is right"
    if totals == [192, 192, 192]:
        return f"Right: {told}."
    if totals == [192, 0, 0]:
        return (
            f"Not yet: {told}. self.seen was set on replicas, which no longer exist. Change an object that they share."
        )
    if totals == [192, 96, 48]:
        why = "Only the first replica shares memory with the original, so only its part was counted."
        return f"Not yet: {told}. {why}"
    return f"Not yet: {told}. Is every image counted by exactly one replica?"


check = Checks(on_ranks(forward, ranks=[0]), on_ranks(counting, ranks=[0]))
