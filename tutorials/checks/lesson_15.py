"""Checks of lesson 15."""

from . import Checks, Prediction, Predictions, on_ranks


def parameter_groups(torch, Network, shard):
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    network = Network()
    whole = sum(one.numel() for one in network.parameters())
    try:
        model = shard(network)
    except Exception:
        if isinstance(network, FSDPModule):
            return "Not yet: fully_shard was called for the network before its layers. Call it for the layers first."
        raise
    if not isinstance(model, torch.nn.Module):
        return "Not yet: shard should return the network."
    groups = [name for name, one in model.named_modules() if isinstance(one, FSDPModule)]
    if not groups:
        return "Not yet: fully_shard was not applied."
    if groups == [""]:
        return "Not yet: the network is still one group. Apply fully_shard to each layer before the network."
    if "" not in groups:
        return "Not yet: the layers are groups, but the network is none. Apply fully_shard to it, too, at the end."
    missing = [f"layers.{index}" for index in range(len(network.layers)) if f"layers.{index}" not in groups]
    if missing:
        return f"Not yet: {missing[0]} has no group of its own."
    mine = sum(one.to_local().numel() for one in model.parameters())
    if mine > 0.6 * whole:
        return "Not yet: this rank still holds most of the parameters."
    try:
        model(torch.zeros(2, 64)).sum().backward()
    except RuntimeError as error:
        return f"Not yet: the model does not train: {error}"
    for index, layer in enumerate(network.layers):
        layer.unshard()
        gathered = [name for name, one in model.named_parameters() if not isinstance(one, DTensor)]
        layer.reshard()
        if not all(name.startswith(f"layers.{index}.") for name in gathered):
            return "Not yet: several layers are in one group. Call fully_shard once for each layer, not for a list."
    return f"Right: {len(groups)} modules, and this rank holds {mine / whole:.0%} of the parameters."


def gathered_once(lab):
    groups = lab.timeline.parameter_groups()
    groups = groups[groups["complete"]]
    newest = groups[groups["reducer"] == groups["reducer"].max()] if len(groups) else groups
    with_parameters = newest[newest["sharded_bytes"] > 0]
    if not len(with_parameters):
        return "Not yet: no sharded step was recorded. Run the cell of the exercise."
    if with_parameters["module"].nunique() < 6:
        return "Not yet: keep a group for each layer, as shard has."
    if (with_parameters["backward_unshards"] > 0).any():
        names = with_parameters[with_parameters["backward_unshards"] > 0]["module"]
        return f"Not yet: {names.iloc[0]} is still gathered before its backward. Which option keeps its parameters?"
    if (with_parameters["forward_unshards"] == 0).any():
        return "Not yet: some groups are not gathered at all."
    return "Right: each group is gathered once in a step, and stays until its backward."


def number_of_ranks(limit, peak, ranks_needed, fits_with_zero):
    tried = (2, 4, 8, 16, 32, 64)
    wanted = next(ranks for ranks in tried if peak("fully_shard", ranks) <= limit)
    if ranks_needed not in tried:
        return "Not yet: ranks_needed should be 2, 4, 8, 16, 32 or 64."
    if ranks_needed < wanted:
        found = peak("fully_shard", ranks_needed) / 2**20
        return f"Not yet: on {ranks_needed} ranks the peak is {found:.0f} MiB, which is too much."
    if ranks_needed > wanted:
        return f"Not yet: it also fits on {ranks_needed // 2} ranks."
    zero = peak("zero-1", 64)
    if not isinstance(fits_with_zero, bool):
        return "Not yet: that is the number. Set fits_with_zero to True or False."
    if fits_with_zero != (zero <= limit):
        return "Not yet: that is the number. Look at the peak of ZeRO-1 on 64 ranks again."
    return f"Right: {wanted} ranks. With ZeRO-1 each of 64 ranks would still need {zero / 2**20:.0f} MiB."


def same_on_both_ranks(torch, dist, build):
    model, optimizer, _ = build("ddp")
    held = [one for parameter in model.parameters() for one in (parameter.detach(), parameter.grad)]
    held += [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    same = 0
    for one in held:
        copy = one.clone()
        dist.broadcast(copy, 0)
        equal = torch.tensor([int(torch.equal(copy, one))])
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        same += int(equal) * one.nbytes
    share = same / sum(one.nbytes for one in held)
    return min(_SHARES, key=lambda choice: abs(_SHARES[choice] - share))


def size_of_the_peak(measured):
    share = measured["fully_shard"]["peak"] / measured["ddp"]["peak"]
    return min(_PEAKS, key=lambda choice: abs(_PEAKS[choice] - share))


def exposed_part(table):
    waited = table["forward_unshard_exposed_ms"].sum() / table["forward_unshard_ms"].sum()
    return min(_EXPOSED, key=lambda choice: abs(_EXPOSED[choice] - waited))


def distance(both):
    error = abs(both["error in %"]["fully_shard"])
    return next(choice for choice, most in _DISTANCES.items() if error <= most)


_SHARES = {"the parameters only, about a fifth": 0.2, "about half": 0.5, "all of it": 1.0}
_PEAKS = {"about a third": 0.33, "about half": 0.5, "about three quarters": 0.75}
_EXPOSED = {"next to nothing": 0.0, "about half": 0.5, "all, or nearly all": 1.0}
_DISTANCES = {"within 5 %": 5.0, "within 25 %": 25.0, "further": float("inf")}

check = Checks(on_ranks(parameter_groups), gathered_once, number_of_ranks)

predictions = Predictions(
    Prediction(list(_SHARES), same_on_both_ranks, on_ranks=True),
    Prediction(list(_PEAKS), size_of_the_peak, on_ranks=True),
    Prediction(list(_EXPOSED), exposed_part),
    Prediction(list(_DISTANCES), distance),
)
predict, compare = predictions.predict, predictions.compare
