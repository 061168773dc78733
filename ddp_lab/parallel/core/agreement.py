"""The ranks' agreement before a model is trained: equal parameters, and a number for the reducer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...formatting import label_of
from . import process_groups

__all__ = ["agree", "model_description", "next_number"]

Entry = list[Any]

_next_reducer = 0


def model_description(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    buffers: Iterable[tuple[str, torch.Tensor]],
    options: dict[str, Any],
) -> list[Entry]:
    """What must be equal on all ranks, in order: one entry for each option, parameter and buffer."""
    entries: list[Entry] = [["option", name, value] for name, value in sorted(options.items())]
    for name, parameter in parameters:
        entries.append(
            [
                "parameter",
                name,
                list(parameter.shape),
                str(parameter.dtype).removeprefix("torch."),
                "trained" if parameter.requires_grad else "frozen",
                list(parameter.stride()),
            ]
        )
    entries += [
        ["buffer", name, list(buffer.shape), str(buffer.dtype).removeprefix("torch.")] for name, buffer in buffers
    ]
    return entries


def agree(entries: list[Entry], group: dist.ProcessGroup, device: torch.device, *, collective: bool) -> int:
    """Checks that all ranks have the same model; returns the reducer's number, equal on all of them.

    One small all-gather if they do; a second one, of the whole descriptions, names what differs if not.

    Args:
        entries: of `model_description`.
        group: the process group of the model.
        device: of this group's collectives.
        collective: False checks nothing, and uses only this rank's number.

    Raises:
        RuntimeError: the ranks' models differ; raised on all of them, naming parameter and ranks.
    """
    counter = 0
    if collective:
        text = json.dumps(entries).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
        own = [_next_reducer, process_groups.own_rank(group), digest, len(text)]
        mine = torch.tensor(own, dtype=torch.int64, device=device)
        table = process_groups.gather_numbers(mine, group)
        process_groups.learn_ranks(group, [row[1] for row in table])
        if len({tuple(row[2:]) for row in table}) > 1:
            gathered = _gather(text, [row[3] for row in table], group, device)
            raise RuntimeError(_difference([json.loads(raw) for raw in gathered], process_groups.global_ranks(group)))
        counter = max(row[0] for row in table)
    return next_number(process_groups.global_ranks(group), counter)


def next_number(ranks: Sequence[int], least: int = 0) -> int:
    """A number for a model of these ranks, equal on all that have numbered the same models before.

    Args:
        ranks: global ranks.
        least: it is no smaller than this.
    """
    global _next_reducer
    number = _first_free(max(least, _next_reducer), ranks)
    _next_reducer = number + 1
    return number


def _first_free(counter: int, ranks: Sequence[int]) -> int:
    """The reducer's number: unique among all groups.

    Groups that share a rank get different numbers because that rank's counter grows; groups that share none,
    because each only takes numbers that leave its own lowest rank as the remainder.
    """
    world = dist.get_world_size() if dist.is_initialized() else len(ranks)
    if len(ranks) == world:
        return counter
    return counter + (min(ranks) - counter) % world


def _gather(text: bytes, lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    mine = padded.to(device)
    rows = process_groups.all_gather(mine, group)
    return [bytes(row.cpu().numpy().tobytes()[:length]) for row, length in zip(rows, lengths, strict=True)]


def _difference(models: Sequence[list[Entry]], ranks: Sequence[int]) -> str:
    """Describes the first difference, the ranks' entries, and how many more differ."""
    places = range(max(len(model) for model in models))
    different = [i for i in places if len({json.dumps(model[i]) if i < len(model) else "" for model in models}) > 1]
    holders: dict[str, list[int]] = {}
    for model, rank in zip(models, ranks, strict=True):
        text = _text(model[different[0]]) if different[0] < len(model) else "nothing"
        holders.setdefault(text, []).append(rank)
    found = "; ".join(f"{label_of(on)}: {text}" for text, on in holders.items())
    more = f" ({len(different) - 1} more entries differ.)" if len(different) > 1 else ""
    return (
        f"DDP expects same model across all ranks, but {_headline(models, ranks, different[0])}. "
        f"The first difference, in the order of registration: {found}.{more} Gradients are averaged by position, so "
        "build the same model, in the same order, on every rank."
    )


def _headline(models: Sequence[list[Entry]], ranks: Sequence[int], first: int) -> str:
    """The difference in torch's words, which users search for."""
    counts = [sum(entry[0] == "parameter" for entry in model) for model in models]
    for rank, count in zip(ranks, counts, strict=True):
        if count != counts[0]:
            return f"Rank {ranks[0]} has {counts[0]} params, while rank {rank} has inconsistent {count} params"
    entries = [model[first] if first < len(model) else ["buffer", ""] for model in models]
    mine = entries[0]
    other = next(rank for entry, rank in zip(entries, ranks, strict=True) if entry != mine)
    if mine[0] != "parameter":
        return f"the {mine[0]}s of rank {ranks[0]} differ from those of rank {other}"
    index = sum(entry[0] == "parameter" for entry in models[0][:first])
    return (
        f"params[{index}] in rank {ranks[0]} with sizes {mine[2]} appears not to match sizes/strides, name or dtype of "
        f"the same param in rank {other}"
    )


def _text(entry: Entry) -> str:
    kind, name = entry[:2]
    if kind == "option":
        return f"argument {name}={entry[2]}"
    if kind == "buffer":
        return f"buffer '{name}' of shape {entry[2]}, {entry[3]}"
    return f"parameter '{name}' of shape {entry[2]}, {entry[3]}, {entry[4]}, strides {entry[5]}"
