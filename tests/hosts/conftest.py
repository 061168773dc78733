"""Two hosts for all tests of this folder; without root or namespaces they are skipped, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Lab
from tests.hosts.network import Network, why_not
from tests.leftovers import nothing_more_than_before

CLOCKS = {"a": 5_000, "b": 90_000}  # seconds that the hosts' monotonic clocks are ahead


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Hosts a and b, known to `ssh`; nothing is left of them, nor of what ran there."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    leftovers = nothing_more_than_before()
    next(leftovers)
    made = Network(tmp_path_factory.mktemp("network"), CLOCKS)
    path = os.environ["PATH"]
    os.environ["PATH"] = made.path
    try:
        yield made
    finally:
        os.environ["PATH"] = path
        made.close()
    next(leftovers, None)


@pytest.fixture(scope="module")
def lab(network: Network) -> Iterator[Lab]:
    """One rank on a, two on b; a host that is silent for 20 s is lost."""
    with Lab(hosts="a:1,b:2", hang_seconds=None, host_timeout=20) as cluster:
        yield cluster
