"""What `ddp-lab run` says of programs after reports in public: the rank, the line and the remedy, and nothing else.

The programs stand beside it, each with its source. A line is given here by the text that stands on it: `@text`, in the
function of the program if it is there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SKIPPED = "→ All ranks must make the same number of backwards: decide on all of them together"
ALONE = "→ Either this call is made on one rank alone"
SAME_CALLS = "→ All ranks of a group must make the same calls in the same order."
SAME_TENSORS = "→ Tensors must have the same shape and dtype on all ranks"
JOIN = "→ If ranks have different numbers of batches, train inside `with model.join():`. If one stops early, decide"
LAUNCHER = "→ Leave rank, world_size and init_method out of `init_process_group`: the launcher has set them."
NORMAL = {
    "messages.both_send": (143, ["ranks 0 and 1 are both waiting to send to each other (@dist.send(", "→ Swap the calls"]),
    "messages.other_type": (
        0,
        [
            "no rank failed, but rank 0 entered broadcast #1 of 24 B (float32) at @dist.broadcast(values",
            "rank 1 broadcast #1 of 112 B (int64) at @dist.broadcast(values",
            SAME_TENSORS,
        ],
    ),
    "loops.loss_of_its_own": (
        143,
        [
            "rank 0 is in the backward, for bucket 0 of Net (@loss.backward()",
            "rank 1 is in barrier #10 (@dist.barrier()",
            "Rank 1 made 3 backwards of Net; rank 0 is in its 4th. Rank 1 made a forward at step 3 without a backward.",
            SKIPPED,
        ],
    ),
}
