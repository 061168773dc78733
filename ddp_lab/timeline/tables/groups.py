"""The process groups of a timeline, and the calls of their operations: numbered here, from what ranks say of theirs.

Each rank numbers its groups and calls by itself. One group has the same name and ranks on all its members; after a
rejoin another one may have them, too. A rank is in a group once, so the second one that it describes is another one.
"""

from __future__ import annotations

import json
from typing import Any

from .collectives import GroupInfo

__all__ = ["GroupBook"]

_Own = tuple[int, int, int]  # rank, its life, its number


class GroupBook:
    """Numbers groups and calls.

    Attributes:
        calls: descriptions of type ``"call"`` by their numbers.
    """

    def __init__(self) -> None:
        self._groups: list[GroupInfo] = []
        self._newest: dict[tuple[str, tuple[int, ...]], int] = {}  # (name, ranks) -> number
        self._members: list[set[int]] = []  # number -> ranks that have described it
        self._numbers: dict[_Own, int] = {}
        self.calls: list[dict[str, Any]] = []
        self._texts: dict[str, int] = {}  # a call as text -> its number
        self._calls: dict[_Own, int] = {}

    @property
    def groups(self) -> dict[int, GroupInfo]:
        """The groups by their numbers, in the order in which they were first described."""
        return {one.group: one for one in self._groups}

    def group(self, rank: int, life: int, own: int) -> int:
        """The number here of this rank's group, in this process; -1 if it was not described."""
        return self._numbers.get((rank, life, own), -1)

    def call(self, rank: int, life: int, own: int) -> int:
        """The number here of this rank's call, in this process; -1 if it was not described."""
        return self._calls.get((rank, life, own), -1)

    def describe_group(self, rank: int, life: int, made: dict[str, Any]) -> dict[str, Any]:
        """Adds a group as a rank describes it; returns that with the number used here."""
        key = (made["name"], tuple(made["ranks"]))
        number = self._newest.get(key)
        if number is None or rank in self._members[number]:
            number = self._newest[key] = len(self._groups)
            description, dimension, backend = (
                str(made.get(name, "")) for name in ("description", "mesh_dimension", "backend")
            )
            self._groups.append(GroupInfo(number, made["name"], description, dimension, key[1], backend))
            self._members.append(set())
        self._members[number].add(rank)
        self._numbers[rank, life, made["index"]] = number
        return {**made, "index": number}

    def describe_call(self, rank: int, life: int, made: dict[str, Any]) -> dict[str, Any]:
        """Adds a call as a rank describes it; returns that with the number used here."""
        said = {name: value for name, value in made.items() if name != "index"}
        number = self._texts.setdefault(json.dumps(said, sort_keys=True), len(self.calls))
        if number == len(self.calls):
            self.calls.append(said)
        self._calls[rank, life, made["index"]] = number
        return {**made, "index": number}
