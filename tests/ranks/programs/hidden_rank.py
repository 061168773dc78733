"""A rank whose /proc/PID/fd no other one can open sums until its group breaks: `hidden_rank.py RANK SIZE PORT HOW`.

HOW: ``user``: it gives up the rights of root and to be looked into; ``namespace``: it has been started with process ids
of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist

import ddp_lab.comm

PR_SET_DUMPABLE = 4
NOBODY = 65534


def hide() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def can_look_into(process: int) -> bool:
    try:
        os.listdir(f"/proc/{process}/fd")
    except PermissionError:
        return False
    return True


rank, size, port, how = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ddp_lab.comm.register()
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)  # later imports may be forbidden
dist.destroy_process_group()
store = dist.TCPStore("localhost", port, is_master=False)
if how == "user":
    hide()
store.set(f"process {rank}", str(os.getpid()))
others = [int(store.get(f"process {other}")) for other in range(size) if other != rank]
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    dist.init_process_group("shm", store=store, rank=rank, world_size=size)
backend = dist.group.WORLD._get_backend(torch.device("cpu")).name()
looked = how == "user" and any(can_look_into(other) for other in others)
print(json.dumps([backend, looked, os.getpid(), [str(one.message) for one in told]]), flush=True)
try:
    while True:
        ones = torch.ones(70_001)
        dist.all_reduce(ones)
        assert ones[-1].item() == size
except dist.DistBackendError as error:
    print(error, flush=True)
    os._exit(0)  # the Gloo group beside it would wait for the rank that has died
