"""A notebook is run again from the top after its kernel was restarted: a new cluster in the place of the old one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

from tests import leftovers
from tests.notebooks.running import KERNEL_ENVIRONMENT
from tests.waiting import DEADLINE_S, wait_until

CELLS = (
    "%load_ext ddp_lab",
    "%cluster start -n 2",
    "%%distributed\nassert 'kept' not in globals()\nkept = torch.ones(1); dist.all_reduce(kept); print(kept.item())",
)
DETACHED = (
    "%load_ext ddp_lab",
    "%cluster start -n 2 --detach --name again --idle-timeout 60",
    "%%distributed\nkept = 1",
)


@pytest.fixture
def kernel(tmp_path: os.PathLike[str]) -> Iterator[tuple[KernelManager, Any]]:
    """A Jupyter kernel, which sees no detached cluster of others."""
    environment = {**os.environ, **KERNEL_ENVIRONMENT, "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    manager, client = start_new_kernel(kernel_name="python3", env=environment)
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def run_all(client: Any, cells: tuple[str, ...]) -> str:
    """Runs the cells and returns what they said, results and displays included."""
    said: list[str] = []

    def take(message: dict[str, Any]) -> None:
        content = message["content"]
        said.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

    for cell in cells:
        reply = client.execute_interactive(cell, timeout=DEADLINE_S, output_hook=take)
        assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(said)


@pytest.mark.soak
def test_run_all_after_a_restart(kernel: tuple[KernelManager, Any], nothing_left: None) -> None:
    """The old cluster's processes are gone, the notebook works, and nothing is left when the kernel ends."""
    manager, client = kernel
    before = set(leftovers.processes())
    assert "2.0" in run_all(client, CELLS)
    first = set(leftovers.processes()) - before
    assert len(first) >= 4
    manager.restart_kernel()
    client.wait_for_ready(timeout=DEADLINE_S)
    assert "2.0" in run_all(client, CELLS)
    wait_until(
        lambda: not [pid for pid in first if leftovers.alive(pid) and pid != manager.provisioner.pid], "their end"
    )
    run_all(client, ("%cluster stop",))


@pytest.mark.soak
def test_run_all_again_on_a_detached_cluster(kernel: tuple[KernelManager, Any], nothing_left: None) -> None:
    """`%cluster start --detach --name` finds the cluster that outlived the kernel, `list` and `attach` show it.

    What is on the ranks is kept.
    """
    manager, client = kernel
    assert "`%cluster attach again` re-attaches, for 60 s after the last client disconnects" in run_all(
        client, DETACHED
    )
    manager.restart_kernel()
    client.wait_for_ready(timeout=DEADLINE_S)
    said = run_all(client, (*DETACHED[:2], "%cluster list", "%%distributed\nprint(kept)"))
    assert "attached to again: ranks 0–1 · cpu · shm in " in said
    assert re.search(r"→ +again +ranks 0–1, cpu, idle +this notebook +60 s", said)
    assert said.rstrip().endswith("1")
    assert "detached from again" in run_all(client, ("%cluster detach",))
    assert "attached to again" in run_all(client, ("%cluster attach", "%cluster stop"))
    assert "no cluster is running" in run_all(client, ("%cluster list",))
