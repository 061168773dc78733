"""How a model is sharded: its parameter groups, by names and patterns of modules, or the repeated parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ParameterGroup", "Sharding", "groups_by_name", "numbered_modules"]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that travel together.

    Attributes:
        modules: names of the modules that one call of `fully_shard` got.
        parameters: indices of the parameters.
    """

    modules: tuple[str, ...]
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class Sharding:
    """How `fully_shard` is applied.

    Attributes:
        groups: all groups but the root's, which has the parameters that are in none of them.
        reshard_after_forward: free the groups' parameters after their forward (those of the root stay). False keeps all
            parameters until their backward: one all-gather less for each group, and more memory.
        prefetch: how many groups ahead parameters are gathered; None: as torch does by itself.
    """

    groups: tuple[ParameterGroup, ...] = ()
    reshard_after_forward: bool = True
    prefetch: int | None = None

    def __post_init__(self) -> None:
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch must be at least 0 groups, got {self.prefetch}")


def groups_by_name(names: Sequence[str], groups: str | Sequence[str | Sequence[str]]) -> tuple[ParameterGroup, ...]:
    """The groups that `fully_shard` makes, called for each of `groups`, inner modules first.

    Args:
        names: of the parameters.
        groups: names of modules: a text makes a group of each module that it fits, several texts make one of all of
            theirs. ``*`` stands for one part of a name.

    Raises:
        ValueError: no module has such a name.
    """
    wanted: list[tuple[str, ...]] = []
    for entry in [groups] if isinstance(groups, str) else groups:
        if isinstance(entry, str):
            wanted += [(one,) for one in _fitting(names, entry)]
        else:
            wanted.append(tuple(one for pattern in entry for one in _fitting(names, pattern)))
    group_of: dict[tuple[str, ...], int] = {}
    modules: list[list[str]] = [[] for _ in wanted]
    parameters: list[list[int]] = [[] for _ in wanted]
    for number, entries in enumerate(wanted):
        for one in entries:
            if group_of.setdefault(tuple(one.split(".")), number) == number:
                modules[number].append(one)
    for index, name in enumerate(names):
        owner = tuple(name.split(".")[:-1])
        inner = next((owner[:depth] for depth in range(len(owner), 0, -1) if owner[:depth] in group_of), None)
        if inner is not None:
            parameters[group_of[inner]].append(index)
    made = [ParameterGroup(tuple(of), tuple(own)) for of, own in zip(modules, parameters, strict=True)]
    return tuple(one for one in made if one.parameters)


def _fitting(names: Iterable[str], pattern: str) -> list[str]:
    """The modules that a pattern fits, in the order of their parameters.

    Args:
        names: of the parameters of a model.
        pattern: a module's name, as `named_modules` gives it; ``*`` stands for any part between two points.

    Raises:
        ValueError: it fits none.
    """
    owners = [name.split(".")[:-1] for name in names]
    modules = list(dict.fromkeys(tuple(owner[:depth]) for owner in owners for depth in range(1, len(owner) + 1)))
    wanted = pattern.split(".")
    found = [one for one in modules if _fits(one, wanted)]
    if not found:
        known = ", ".join(dict.fromkeys(one[0] for one in modules))
        raise ValueError(
            f"groups: no module with parameters is called {pattern!r}; the outermost ones are {known}. "
            "Use names as named_modules() gives them, * for any part between two points"
        )
    return [".".join(one) for one in found]


def _fits(module: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(module) == len(wanted) and all(want in ("*", part) for part, want in zip(module, wanted, strict=True))


def numbered_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The modules named with a number, such as ``layers.3``: the repeated parts, which one shards on their own.

    Args:
        names: of the parameters of a model.
    """
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), None)
        if number is not None:
            found[".".join(parts[: number + 1])] = None
    return tuple(found)
