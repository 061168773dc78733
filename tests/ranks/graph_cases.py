"""Random cases for comparisons of gradients: a module graph, how it is wrapped, and the steps it is trained for.

A case is plain data (it can be printed as JSON, sent to ranks, and made smaller), drawn from one seed by `draw`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "PATTERNS",
    "Case",
    "RandomGraph",
    "draw",
    "inputs_of",
    "loss_of",
    "possible",
    "skipped_by",
    "smallest",
    "torch_can",
]

Case = dict[str, Any]
WIDTH = 4
WORDS = 7
SAMPLES = 3
DTYPES = {"single": torch.float32, "double": torch.float64, "complex": torch.complex64}
MODES = ("plain", "find_unused", "static")
# Several forwards in a step: with a backward each, all but the last under no_sync; with one backward of the sum of
# their losses; first all forwards, then all backwards; one forward and several backwards through its graph.
PATTERNS = ("turns", "summed", "separate", "retained")


def draw(seed: int) -> Case:
    """The case that belongs to a seed.

    Returns:
        ``world``: ranks; ``mode``: options for the graph; ``nodes``: see `RandomGraph`; ``output``: the class of
        what forward returns; ``hook``: a comm hook or None; ``pattern``: one of `PATTERNS`; ``steps``: for each step
        how many times that is done, and what zero_grad does before; ``arguments``: of the constructor.
    """
    rng = random.Random(seed)
    mode = rng.choice(MODES)
    pattern = rng.choice(["turns"] * 6 + list(PATTERNS))
    nodes = [_draw_node(rng, index, mode) for index in range(rng.randint(1, 7))]
    for index, node in enumerate(nodes):
        if pattern != "turns":
            node["checkpoint"] = None
        elif node["checkpoint"] == "reentrant" and not _reentrant_works(mode, nodes, index):
            node["checkpoint"] = "non-reentrant"
    steps = [[rng.choice([1, 1, 2, 3]), rng.choice(["none", "none", "zero", "keep"])] for _ in range(rng.randint(2, 4))]
    sparse = any(node["kind"] == "embedding" for node in nodes)
    return {
        "seed": seed,
        "world": rng.choice([1, 2, 2, 3, 4]),
        "mode": mode,
        "pattern": pattern if mode != "static" else "turns",
        "nodes": nodes,
        "output": rng.choice(["list", "dict", "nested", "tensor"]),
        "hook": None if sparse else rng.choice([None, None, None, "allreduce", "fp16"]),
        "steps": steps,
        "arguments": {
            "bucket_cap_mb": rng.choice([None, 0.00005, 0.0001, 0.0003, 0.001]),
            "gradient_as_bucket_view": rng.random() < 0.5,
            "batched_grad_copy": rng.random() < 0.2,
        },
    }


def torch_can(case: Case) -> bool:
    """Whether torch's DDP has the right gradients, too.

    It doesn't synchronise the second of two backwards after two forwards, nor a second backward through one graph,
    nor a static graph after no_sync; and it looks for unused parameters in the last of several forwards alone.
    """
    if any(parts > 1 for parts, _ in case["steps"]):
        return case["mode"] != "static" and (
            case["pattern"] == "turns" or (case["pattern"] == "summed" and case["mode"] == "plain")
        )
    return True


def _draw_node(rng: random.Random, index: int, mode: str) -> dict[str, Any]:
    first = index == 0  # always used and trained, so that there is something to differentiate
    kind = "embedding" if not first and rng.random() < 0.12 else "linear"
    gated = not first and kind == "linear" and mode != "plain" and rng.random() < 0.4
    again = rng.randrange(index) if index and kind == "linear" and rng.random() < 0.35 else None
    ways = [None, None, None, "non-reentrant", "reentrant"]
    return {
        "kind": kind,
        "sources": [rng.randint(0, index) for _ in range(rng.randint(1, 3))],
        "again": again,
        "bias": rng.random() < 0.6,
        "dtype": rng.choice(["single", "single", "single", "double", "complex"]) if kind == "linear" else "single",
        "frozen": not first and rng.random() < 0.15,
        "gated": gated,
        "checkpoint": rng.choice(ways) if kind == "linear" else None,
    }


def _reentrant_works(mode: str, nodes: list[dict[str, Any]], index: int) -> bool:
    """Whether torch can do it: not where it looks for unused parameters, nor with a layer that is used twice."""
    uses = sum(node["again"] == index for node in nodes)
    return mode == "static" or (mode == "plain" and nodes[index]["again"] is None and not uses)


def possible(case: Case) -> bool:
    """Whether a case made from another one is still one that torch can do."""
    nodes = case["nodes"]
    return (
        not (case["mode"] == "plain" and any(node["gated"] for node in nodes))
        and not (case["mode"] == "static" and case["pattern"] != "turns")
        and all(n["checkpoint"] != "reentrant" or _reentrant_works(case["mode"], nodes, i) for i, n in enumerate(nodes))
    )


class RandomGraph(nn.Module):
    """Each node applies its layer, and perhaps an earlier node's again, to the sum of some earlier values.

    Each node is a dict: ``kind`` linear or embedding (whose gradients are sparse), ``sources`` (0 is the input, n the
    value of node n - 1), ``again`` (an earlier node whose layer is used once more), ``bias``, ``dtype``, ``frozen``,
    ``gated`` (may be skipped) and ``checkpoint``.
    """

    def __init__(self, nodes: list[dict[str, Any]], output: str) -> None:
        super().__init__()
        self.nodes = nodes
        self.output = output
        self.layers = nn.ModuleList(map(self._layer, nodes))

    @staticmethod
    def _layer(node: dict[str, Any]) -> nn.Module:
        layer: nn.Module
        if node["kind"] == "embedding":
            layer = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=True)
        else:
            layer = nn.Linear(WIDTH, WIDTH, bias=node["bias"], dtype=DTYPES[node["dtype"]])
        return layer.requires_grad_(not node["frozen"])

    def forward(self, x: torch.Tensor, words: torch.Tensor, skipped: list[int]) -> Any:
        values = [x]
        for index, node in enumerate(self.nodes):
            total = torch.stack([values[source % len(values)] for source in node["sources"]]).sum(0)
            if index not in skipped:
                total = self._apply_node(index, node, total, words)
            values.append(total)
        return self._packed(values[1:])

    def _apply_node(self, index: int, node: dict[str, Any], total: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        if node["kind"] == "embedding":
            return total + self.layers[index](words).double()
        layers = [self.layers[index]]
        if node["again"] is not None and self.nodes[node["again"]]["kind"] == "linear":
            layers.append(self.layers[node["again"]])

        def run(value: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                out = layer(value.to(layer.weight.dtype))
                value = torch.tanh(out.real + out.imag if out.is_complex() else out).double()
            return value

        if node["checkpoint"] is None:
            return run(total)
        return checkpoint(run, total, use_reentrant=node["checkpoint"] == "reentrant")

    def _packed(self, values: list[torch.Tensor]) -> Any:
        if self.output == "tensor":
            return torch.stack(values)
        if self.output == "dict":
            return {str(index): value for index, value in enumerate(values)}
        if self.output == "nested":
            return values[0], [{"rest": tuple(values[1:])}]
        return values


def loss_of(output: Any) -> torch.Tensor:
    """A mean over all values that depends on each of them."""
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    losses = [loss_of(part) for part in (output.values() if isinstance(output, dict) else output)]
    return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)


def inputs_of(case: Case, rank: int, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What one rank's forward is given: samples, words and the nodes it skips."""
    generator = torch.Generator().manual_seed(1_000_003 * case["seed"] + 1009 * rank + 17 * step + part)
    x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    words = torch.randint(WORDS, (SAMPLES, 2), generator=generator)
    return x, words, skipped_by(case, rank, step, part)


def skipped_by(case: Case, rank: int, step: int, part: int) -> list[int]:
    """The gated nodes that a forward skips: any with find_unused_parameters, always the same in a static graph."""
    where = (rank, step, part) if case["mode"] == "find_unused" else ()
    rng = random.Random(f"{case['seed']} {where}")
    return [index for index, node in enumerate(case["nodes"]) if rng.random() < 0.5 and node["gated"]]


# -- making a failing case smaller


def smallest(case: Case, fails: Callable[[Case], bool], attempts: int = 200) -> Case:
    """The smallest case found that still fails: the first simpler one that fails is taken, again and again.

    Args:
        case: one that fails.
        fails: whether a case fails; may be slow.
        attempts: the most calls of `fails`.
    """
    tried = 0
    while True:
        for simpler in filter(possible, _simpler(case)):
            tried += 1
            if tried > attempts:
                return case
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def _simpler(case: Case) -> Iterator[Case]:  # noqa: C901 - a list of simplifications
    """Cases that are one thing simpler, the boldest first."""
    half = case
    for index in reversed(range((len(case["nodes"]) + 1) // 2, len(case["nodes"]))):
        half = _without_node(half, index)
    if half is not case:
        yield half
    for index in reversed(range(1, len(case["nodes"]))):
        yield _without_node(case, index)
    for index in range(len(case["steps"])):
        if len(case["steps"]) > 1:
            yield {**case, "steps": case["steps"][:index] + case["steps"][index + 1 :]}
    plain: dict[str, Any] = {"hook": None, "output": "list", "mode": "plain", "pattern": "turns"}
    for name, value in plain.items():
        if case[name] != value:
            yield {**case, name: value}
    for world in range(1, case["world"]):
        yield {**case, "world": world}
    for name, value in (("bucket_cap_mb", None), ("gradient_as_bucket_view", False), ("batched_grad_copy", False)):
        if case["arguments"][name] != value:
            yield {**case, "arguments": {**case["arguments"], name: value}}
    for index, (parts, zero) in enumerate(case["steps"]):
        for simple in ([1, zero], [parts, "none"]):
            if simple != [parts, zero]:
                yield {**case, "steps": [*case["steps"][:index], simple, *case["steps"][index + 1 :]]}
    for index, node in enumerate(case["nodes"]):
        yield from _simpler_node(case, index, node)


def _simpler_node(case: Case, index: int, node: dict[str, Any]) -> Iterator[Case]:
    easy = {
        "kind": "linear", "sources": [index], "again": None, "bias": False, "dtype": "single", "frozen": False,
        "gated": False, "checkpoint": None,
    }  # fmt: skip
    for name, value in easy.items():
        if node[name] != value:
            simpler = copy.deepcopy(case)
            simpler["nodes"][index][name] = value
            yield simpler


def _without_node(case: Case, removed: int) -> Case:
    simpler = copy.deepcopy(case)
    del simpler["nodes"][removed]
    for index, node in enumerate(simpler["nodes"]):
        node["sources"] = [min(source - (source > removed), index) for source in node["sources"]]
        if node["again"] is not None:
            node["again"] = None if node["again"] == removed else node["again"] - (node["again"] > removed)
    return simpler
