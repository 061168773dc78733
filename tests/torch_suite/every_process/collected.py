"""torch's DDP tests as they ship in its wheel: the classes that the lists name, ready to run."""

from __future__ import annotations

import other_backend
from own_cases import OneProcess, Threads, TwoRanks
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import DdpComparisonTest, DdpUnderDistAutogradTest
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import generate_tests

__all__ = ["OneProcess", "TestDistBackendWithSpawn", "Threads", "TwoRanks"]


class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    """Each test in WORLD_SIZE processes."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


# spawned ranks find their class by name in this module: TensorPipeDdpComparisonTest, …
globals().update(
    generate_tests(
        "TensorPipe",
        TensorPipeRpcAgentTestFixture,
        [DdpUnderDistAutogradTest, DdpComparisonTest, RpcTest],
        __name__,
    )
)
other_backend.rename()
