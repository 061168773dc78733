"""What the tests on GPUs leave behind on purpose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ddp_lab import DataParallel
from tests.leftovers import nothing_more_than_before


@pytest.fixture(autouse=True, scope="session")
def nothing_left_by_session() -> Iterator[None]:
    """As for all tests; the NCCL communicator of a process that copies between devices stays, with its sockets."""
    if torch.cuda.is_available():
        DataParallel(nn.Linear(2, 2).cuda(), [0, 0])(torch.ones(2, 2).cuda())
    yield from nothing_more_than_before()
