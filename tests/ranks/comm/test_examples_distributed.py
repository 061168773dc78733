"""Each example of torch.distributed's reference (1.7), as it stands there; a note says what torch has changed since."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_lab.comm import all_reduce_multigpu
from tests.ranks.conftest import Ranks
from tests.ranks.harness import on_ranks

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=60)


def _store(timeout: timedelta = LONG) -> dist.TCPStore:
    """Changed: the arguments' order, so they are named here; port 0 takes a free one."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)


def test_tcp_store() -> None:
    """Example: what the server's side sets, a client gets, and the other way round."""
    server_store = _store()
    client_store = dist.TCPStore("127.0.0.1", server_store.port, is_master=False)
    server_store.set("first_key", "first_value")
    assert client_store.get("first_key") == b"first_value"
    client_store.set("second_key", "second_value")
    assert server_store.get("second_key") == b"second_value"


def test_hash_store() -> None:
    """Example: another thread sets what this one waits for."""
    store = dist.HashStore()
    store.set("first_key", "first_value")
    thread = threading.Thread(target=store.set, args=("second_key", "second_value"))
    thread.start()
    assert store.get("second_key") == b"second_value"
    thread.join()
    assert store.get("first_key") == b"first_value"


def test_file_store(tmp_path: Path) -> None:
    """Example: two stores on one file."""
    store1 = dist.FileStore(f"{tmp_path}/filestore", 2)
    store2 = dist.FileStore(f"{tmp_path}/filestore", 2)
    store1.set("first_key", "first_value")
    assert store2.get("first_key") == b"first_value"


def test_methods_of_a_store() -> None:
    """Examples of set, get, add, num_keys and delete_key. Changed: num_keys counts no key of the store's own."""
    store = _store()
    store.set("first_key", "first_value")
    assert store.get("first_key") == b"first_value"
    store.set("first_key", "another")
    assert store.get("first_key") == b"another"
    store.add("counter", 1)
    store.add("counter", 6)
    assert store.get("counter") == b"7"
    assert store.num_keys() == 2
    assert store.delete_key("first_key")
    assert not store.delete_key("bad_key")


def test_waiting_for_a_key_that_never_comes() -> None:
    """Examples of wait with the store's timeout, with its own, and of set_timeout."""
    store = _store(SHORT)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms, keys: /bad_key"):
        store.wait(["bad_key"])
    store.set_timeout(LONG)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 100ms"):
        store.wait(["bad_key"], timedelta(seconds=0.1))
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms"):
        store.get("bad_key")


@contextmanager
def outside(rank: int, size: int, folder: str) -> Iterator[None]:
    """Without the default group, which is made again afterwards."""
    dist.destroy_process_group()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/afterwards", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _initialize(rank: int, size: int, folder: str) -> None:
    meeting = dist.FileStore(f"{folder}/meeting", size)

    def port(name: str) -> str:
        """A free one, which rank 0 tells the others."""
        if rank == 0:
            meeting.set(name, str(dist.TCPStore("127.0.0.1", 0, is_master=True).port))
        return meeting.get(name).decode()

    def check() -> None:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == size
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()

    with outside(rank, size, folder):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port('tcp')}", rank=rank, world_size=size)
        check()
        dist.init_process_group("gloo", init_method=f"file://{folder}/sharedfile", rank=rank, world_size=size)
        check()
        url = f"tcp://127.0.0.1:{port('url')}?rank={rank}&world_size={size}"
        dist.init_process_group("gloo", init_method=url)
        check()
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port("env"), "RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ.update(variables)
        try:
            dist.init_process_group("gloo")  # env:// is the default
            check()
            os.environ["MASTER_PORT"] = port("arguments")
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
            dist.init_process_group("GLOO", init_method="env://", rank=rank, world_size=size)
            check()
        finally:
            for name in variables:
                os.environ.pop(name, None)
        store = dist.TCPStore("127.0.0.1", int(port("store")), size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        check()


def test_initialize(ranks: Ranks, tmp_path: Path) -> None:
    """Examples: tcp, file, environment variables (from arguments, too), all of it in the URL, and a store."""
    ranks(2, _initialize, str(tmp_path))


SPLITS = ([2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1])


def _all_to_all(rank: int, size: int, backend: str) -> list[list[list[int]]]:
    group = dist.new_group(backend=backend)
    found = []
    ours = list((torch.arange(4) + rank * 4).chunk(4))
    output = list(torch.empty([4], dtype=torch.int64).chunk(4))
    dist.all_to_all(output, ours, group=group)
    found.append([one.tolist() for one in output])
    scattered = [torch.empty_like(one) for one in output]
    for other in range(size):  # "essentially, it is similar to"; changed: an empty list must be None
        dist.scatter(scattered[other], ours if other == rank else None, src=other, group=group)
    assert [one.tolist() for one in scattered] == found[0]
    whole = torch.arange(sum(SPLITS[rank])) + 10 * rank
    comes = [SPLITS[other][rank] for other in range(size)]
    output = [torch.empty(count, dtype=torch.int64) for count in comes]
    if backend == "gloo":  # takes unequal parts in one tensor alone
        joined = torch.cat(output)
        dist.all_to_all_single(joined, whole, comes, SPLITS[rank], group=group)
        output = list(joined.split(comes))
    else:
        dist.all_to_all(output, list(whole.split(SPLITS[rank])), group=group)
    found.append([one.tolist() for one in output])
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_all_to_all(ranks: Ranks, backend: str) -> None:
    """Examples with four ranks, equal and unequal parts. Changed: Gloo has it now."""
    found = ranks(4, _all_to_all, backend)
    assert [equal for equal, _ in found] == [[[rank + 4 * other] for other in range(4)] for rank in range(4)]
    assert [unequal for _, unequal in found] == [
        [[0, 1], [10, 11, 12], [20, 21], [30, 31]],
        [[2, 3], [13, 14], [22], [32, 33]],
        [[4], [15, 16], [23], [34, 35]],
        [[5], [17, 18], [24], [36]],
    ]


@on_ranks(2)
def test_all_reduce_multigpu(rank: int, size: int) -> None:
    """Example: two nodes of eight devices; all 16 tensors are 16. Changed: the function is ours; here on the CPU."""
    tensor_list = [torch.FloatTensor([1]) for _dev_idx in range(8)]
    all_reduce_multigpu(tensor_list)
    assert [tensor.item() for tensor in tensor_list] == [16.0] * 8


SCRIPT = """
import argparse, json, os, sys
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int)  # changed: torch passes it with a hyphen now
parser.add_argument("folder")
args = parser.parse_args()
local_rank = int(os.environ["LOCAL_RANK"]) if args.local_rank is None else args.local_rank
torch.distributed.init_process_group(backend="gloo", init_method="env://")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))  # on GPUs: device_ids=[local_rank]
model(torch.ones(1, 2)).sum().backward()
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
with open(f"{args.folder}/{rank}", "w") as file:
    json.dump([args.local_rank, local_rank, size, model.module.weight.grad.tolist()], file)
torch.distributed.destroy_process_group()
"""


@pytest.mark.soak
def test_launch(tmp_path: Path) -> None:
    """Example: torch.distributed.launch starts two processes, which parse --local_rank; --standalone finds a port."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", "--standalone"]
    environment: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, script, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert found == [[rank, rank, 2, [[1.0, 1.0]]] for rank in range(2)]
