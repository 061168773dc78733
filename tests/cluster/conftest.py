"""Clusters for tests: one per module where tests don't disturb each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import Cluster
from ddp_lab.output.board import SilentBoard
from ddp_lab.protocol import registry
from tests.leftovers import nothing_more_than_before


class Lab(Cluster):
    """A cluster whose cells print nothing, with what the tests often need."""

    def values(self, code: Any, *args: Any, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Runs a cell and returns its values by rank."""
        return dict(self.run(code, *args, ranks=ranks).values)

    def run(self, code: Any, /, *args: Any, **options: Any) -> Any:
        if not callable(code):  # all keywords of a function's are its own
            options.setdefault("board", SilentBoard())
        return super().run(code, *args, **options)

    def sum_of_ones(self) -> dict[int, float]:
        """A collective over all ranks: each gives the world size."""
        return self.values("t = torch.ones(1); dist.all_reduce(t); t.item()")


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_module() -> Iterator[None]:
    """Nothing is left of what a module's tests share."""
    yield from nothing_more_than_before()


@pytest.fixture(autouse=True)
def nothing_left_by_test(request: pytest.FixtureRequest) -> None:
    """Nothing is left by any test here; where processes are replaced while their cluster lives, by its module."""
    if not getattr(request.module, "REPLACES_PROCESSES", False):
        request.getfixturevalue("nothing_left")


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which detached clusters and servers for assistants are found: that of a module's tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield registry.folder()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two ranks for all tests of a module."""
    with Lab(2) as cluster:
        yield cluster
