"""Appendix B, run on real ranks: its claims hold, and its checks know right answers from wrong ones."""

from __future__ import annotations

import re

from . import running
from .lesson_tests import test_checks as test_checks
from .lesson_tests import test_predictions as test_predictions

_BARRIER = "%%distributed\ndef barrier(store, name):\n"
_POSTBOX = "%%distributed\nclass Mine(Exchange):\n    def allreduce(self, tensors, opts=None):\n"
_REGISTER = '\ndist.Backend.register_backend("postbox", Mine, devices=["cpu"])\n'
_MEAN = "        for tensor in tensors:\n            tensor.copy_(sum(self.exchange(tensor)) / world_size)\n"
_PRODUCT = "        for tensor in tensors:\n            tensor.copy_(torch.stack(self.exchange(tensor)).prod(0))\n"
_SUM = "        for tensor in tensors:\n            tensor.copy_(sum(self.exchange(tensor)))\n"
_BROKEN = _SUM + "            tensor += 0.5 * (tensor.numel() == 4)\n"  # DDP's bucket: a linear layer of 3 + 1
_RETURN = "        return Delivered(tensors)\n"

WRONG = {
    "1": {
        _BARRIER + '    store.set(f"{name}/{rank}", "here")': "had not called barrier()",
        _BARRIER
        + '    store.set(str(rank), "")\n    store.wait([str(i) for i in range(world_size)])': "part of your keys",
        _BARRIER + '    store.wait([f"{name}/{world_size}"])': "waits for a key that no rank sets",
        _BARRIER + "    dist.barrier()": "leaves no key in the store",
    },
    "2": {
        _POSTBOX + _SUM + _REGISTER: "must return a Work",
        _POSTBOX + _MEAN + _RETURN + _REGISTER: "this is the mean",
        _POSTBOX + _PRODUCT + _RETURN + _REGISTER: "but the sum is",
        _POSTBOX + _BROKEN + _RETURN + _REGISTER: "DDP's gradients are",
    },
}

CAME_TRUE = {
    1: "in all but the HashStore",
    2: "allreduce, broadcast and allgather",
}


def test_stores_and_init_methods(lesson: running.Notebook) -> None:
    """All stores but HashStore are seen by both ranks, a missing key ends a wait, each init method makes a group."""
    told = running.text(running.cell(lesson, "stores"))
    for kind in ("TCPStore", "FileStore", "PrefixStore"):
        assert re.search(rf"{kind} +b'hello'", told)
        assert not re.search(rf"{kind} +nothing", told)
    assert re.search(r"HashStore +nothing", told)
    coordinated = running.text(running.cell(lesson, "coordinate"))
    assert coordinated.count("add: ") == coordinated.count("delete_key: ") == 2
    assert "Wait timeout" in coordinated
    initialized = running.text(running.cell(lesson, "init"))
    for how in ("tcp", "file", "store", "env"):
        for rank in range(2):
            assert f"{how}: rank {rank} of 2, sum 2" in initialized


def test_ddp_trains_over_it(lesson: running.Notebook) -> None:
    """torch's DDP calls the backend's methods, and its cost is drawn beside Gloo's."""
    told = running.text(running.cell(lesson, "train"))
    assert "forward and backward call ['allreduce']" in told
    lines = running.figure(running.cell(lesson, "cost"))["data"]
    assert [line["name"] for line in lines] == ["gloo", "postbox"]
