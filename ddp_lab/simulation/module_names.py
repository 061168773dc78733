"""Which modules of a model are meant: by names, patterns, or the repeated parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["fitting_modules", "numbered_modules"]


def fitting_modules(names: Iterable[str], pattern: str) -> list[str]:
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
    """The modules with a number for a name, such as ``layers.3``: the repeated parts, which one shards on their own.

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
