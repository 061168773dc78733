"""Scripts under `ddp-lab run` on two hosts: who is cut off from the others is named on both sides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.network import Network
from tests.waiting import wait_until

SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10_000):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.05)
    if step == 100:
        open(f"begun-{dist.get_rank()}", "w").close()
"""


def _start(network: Network, name: str, folder: Path) -> subprocess.Popen[bytes]:
    address = network.hosts["a"].address
    options = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {address}:29400 --rdzv-id job"
    options += f" --rdzv-conf is_host={int(name == 'a')}"  # its own name is known to no name server
    options += f" --local-addr {network.hosts[name].address} --hang-seconds 6 --record {folder / f'run-{name}'}"
    command = f"cd {folder} && GLOO_SOCKET_IFNAME=eth7 exec {sys.executable} -m ddp_lab run {options} forever.py"
    command += f" > /dev/null 2> errors-{name}"  # the connection of ssh is cut, too
    return subprocess.Popen([f"{network.folder}/bin/ssh", "-n", name, command], stderr=subprocess.DEVNULL)


@pytest.mark.soak
def test_a_host_is_cut_off(network: Network, tmp_path: Path) -> None:
    """Each side names the other node, or the store that it lost, with its own rank's line."""
    (tmp_path / "forever.py").write_text(SCRIPT)
    agents = [_start(network, name, tmp_path) for name in ("a", "b")]

    def told(name: str) -> str:
        return (tmp_path / f"errors-{name}").read_text()

    try:
        wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "the ranks train")
        network.hosts["b"].cut()
        wait_until(lambda: "is cut off: " in told("a") and "is cut off: " in told("b"), "both sides say it")
        for name, other in (("a", "b"), ("b", "a")):
            named = f"({other}) does not answer", f"the job's store at {network.hosts['a'].address}:"
            assert any(words in told(name) for words in named), told(name)
            assert "waits in all_reduce #" in told(name)
            assert "forever.py:5" in told(name)
    finally:
        network.hosts["b"].mend()
        for one in agents:
            one.kill()
            one.wait()
