"""What `ddp-lab run` says of programs after reports in public: the ranks, their lines and the remedy, first of all.

The programs stand beside this file, each with its source, and with what is right to say. In what is expected here, a
text in double angle brackets stands for the line that it is on, of the program's function if it is there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SKIPPED = "→ All ranks must make the same number of backwards: decide on all of them together"
ALONE = "→ Either this call is made on one rank alone (all ranks of the group must make it, or none)"
SAME_CALLS = "→ All ranks of a group must make the same calls in the same order."
SAME_TENSORS = "→ Tensors must have the same shape and dtype on all ranks"
JOIN = "→ If ranks have different numbers of batches, train inside `with model.join():`, or stop all ranks together."
LAUNCHER = "→ Leave rank, world_size and init_method out of `init_process_group`: the launcher has set them."
TRAINED = "<<8)).square().mean().backward()>>"
PROGRAMS = {
    "loops.own_patience": [
        "rank 1 had finished the program",
        "for bucket 0 of Linear at <<inputs)).square()>>, in which rank 0 waited for it.",
        "Rank 1 made 9 backwards of Linear; rank 0 is in its 10th.",
        JOIN,
    ],
    "loops.stop_command": [
        "rank 0 is in broadcast_object_list #16 of 25 B (uint8 [25]) with root 0 (<<dist.broadcast_object_list(>> in",
        "rank 1 is in the backward, for bucket 0 of Linear (<<inputs)).square()>> in train())",
        "Rank 0 made 6 backwards of Linear; rank 1 is in its 7th.",
        ALONE,
    ],
    "loops.longer_stream": [
        "rank 0 entered all_reduce #14 of 72 B (float32) for bucket 0 of Linear at <<inputs)).square()>> in train()",
        "rank 1 all_reduce #14 of 4 B (float32) at <<dist.all_reduce(loss)>> in longer_stream().",
        "Rank 1 made 10 backwards of Linear; rank 0 is in its 11th.",
        ALONE,
    ],
    "loops.least_seconds": [
        "rank 0 had finished the program",
        "for bucket 0 of Linear at <<inputs)).square()>>, in which rank 1 waited for it.",
        "Rank 0 made 19 backwards of Linear; rank 1 is in its 20th.",
        JOIN,
    ],
    "loops.skips_after_memory_error": [
        "rank 0 entered all_reduce #19 of 424 B (float32 [106]) at <<loss.backward()>>",
        "rank 1 broadcast #19 of 64 B (float32 [16]) at <<loss = model(>>.",
        "Rank 1 made 4 backwards of Sequential; rank 0 is in its 5th.",
        "Rank 1 made a forward at step 4 without a backward.",
        SKIPPED,
    ],
    "loops.invalid_loss": [
        "rank 1 ended early: ValueError: loss is NaN (<<raise ValueError>>); rank 0 then waited in all_reduce #8",
        "for bucket 0 of Linear at <<loss.backward()>>.",
    ],
    "loops.empty_tail": [
        "rank 1 ended early: IndexError: list index out of range (<<for inputs in>>); rank 0 then waited in",
        "at <<model(inputs)>>.",
    ],
    "loops.worker_killed": [  # the signal that reports it comes in either line of the loop
        "rank 1 ended early: ",
        "is killed by signal: Killed",
        "; rank 0 then waited in all_reduce #",
    ],
    "loops.reader_ended": [
        "rank 0 waits in the backward, for bucket 0 of Linear (<<batches.get()>>)",
        "rank 1 is in `batches.get()` at <<batches.get()>>.",
        "→ rank 1 is waiting for a thread or a queue of its own.",
    ],
    "loops.part_on_one_rank": [
        "rank 0 entered all_reduce #11 of 576 B (float32) for bucket 0 of Video at <<else 3)).square()>> in part_on",
        "rank 1 all_reduce #11 of 32 B (float32) at <<dist.all_reduce(mean)>> in forward().",
        ALONE,
    ],
    "loops.rank_without_targets": [
        "2 of 6 parameters got no gradient in step 3 on rank 1 (Net (loops.py:",
        "find_unused_parameters=True",
        "Parameters which did not receive grad for rank 1: boxes.weight, boxes.bias",
    ],
    "loops.loss_of_its_own": [
        "rank 0 is in the backward, for bucket 0 of Net (<<loss.backward()>> in loss_of_its_own())",
        "rank 1 is in barrier #10 (<<dist.barrier()>> in loss_of_its_own()).",
        "Rank 1 made 3 backwards of Net; rank 0 is in its 4th. Rank 1 made a forward at step 3 without a backward.",
        SKIPPED,
    ],
    "saving.file_seen_by_one": [
        "rank 0 is in broadcast_object_list #3 of 24 B (uint8 [24]) with root 0 (<<dist.broadcast_object_list(>> in",
        f"rank 1 is in the backward, for bucket 0 of Linear ({TRAINED} in train())",
        ALONE,
    ],
    "saving.gathers_on_main": [
        "rank 0 entered all_gather #1 of 8 B (int64 [1]) at <<dist.gather_object(>>, rank 1 barrier #1 at",
        "<<dist.barrier()>>.",
        SAME_CALLS,
    ],
    "saving.metric_on_rank0": [
        "rank 1 had finished the program",
        "without entering all_gather #9 of 8 B (float32) at <<dist.all_gather(everywhere>>, in which rank 0 waited",
        SAME_CALLS,
    ],
    "saving.tracker_without_network": [
        "rank 1 waits in new_group (<<dist.new_group()>>); rank 0 is in `tracker.recv(1)` at <<tracker.recv(1)>>.",
    ],
    "saving.prepares_past_the_timeout": ["rank 1 waits in barrier #1 (<<dist.barrier()>>); rank 0 is in `"],
    "saving.nothing_to_report": [
        "rank 0 is in all_gather_object #14 of 34 B (uint8 [34]) (<<dist.all_gather_object(>> in",
        f"rank 1 is in the backward, for bucket 0 of Linear ({TRAINED} in train())",
        ALONE,
    ],
    "saving.other_keys": [
        f"rank 0 entered all_reduce #16 of 72 B (float32) for bucket 0 of Linear at {TRAINED} in train()",
        "rank 1 all_reduce #16 of 4 B (float32) at <<dist.all_reduce(mean)>> in log().",
        ALONE,
    ],
    "saving.same_folder_twice": [
        "rank 1 ended early: FileExistsError: [Errno 17] File exists: 'checkpoint' (<<os.makedirs(\"checkpoint\")>>);",
        "rank 0 then waited in barrier #10 at",
    ],
    "saving.saves_by_the_clock": [
        "rank 0 is in broadcast #9 of 8 B (int64 [1]) with root 0 (<<dist.broadcast(name>> in saves_by_the_clock())",
        f"rank 1 is in the backward, for bucket 0 of Linear ({TRAINED} in train())",
        ALONE,
    ],
    "saving.full_state_on_rank0": [
        "rank 0 entered all_gather #7 of 128 B (float32 [4, 8]) at <<get_model_state_dict(>>, rank 1 barrier #7 at",
        "<<dist.barrier()>>.",
        SAME_CALLS,
    ],
    "messages.both_send": [
        "ranks 0 and 1 are both waiting to send to each other (<<dist.send(>>).",
        "→ Swap the calls on one of the two ranks",
    ],
    "messages.leaves_before_it_is_sent": [
        "rank 0 had finished the program (it called sys.exit (<<sys.exit()>>)) without waiting for its send of 64 B",
        "to rank 1 at <<dist.isend(>>; rank 1 had entered recv of 64 B (float32) from rank 0 at <<dist.recv(>>.",
        "→ Wait for what `isend` and `irecv` return before the program ends.",
    ],
    "messages.uneven_parts": [
        "rank 0 entered all_gather #1 of 2.25 KiB (float32) at <<dist.all_gather_into_tensor(>>",
        "rank 1 all_gather #1 of 2.19 KiB (float32) at <<dist.all_gather_into_tensor(>>.",
        "→ Gather the lengths first and pad to the longest",
    ],
    "messages.other_type": [
        "no rank failed, but rank 0 entered broadcast #1 of 24 B (float32) at <<dist.broadcast(values>>",
        "rank 1 broadcast #1 of 112 B (int64) at <<dist.broadcast(values>>.",
        SAME_TENSORS,
    ],
    "messages.other_parameter": [
        "no rank failed, but rank 0 entered broadcast #3 of 64 B (float32) at <<dist.broadcast(parameter.data>>",
        "rank 1 broadcast #3 of 160 B (float32) at <<dist.broadcast(parameter.data>>.",
        SAME_TENSORS,
    ],
    "messages.monitored": [
        "rank 0 waits in monitored_barrier #1 (<<dist.monitored_barrier(>>); rank 1 is in `mirror.recv(1)` at",
        "<<mirror.recv(1)>>.",
    ],
    "messages.source_of_another_group": [
        "rank 1 ended early: ValueError: Global rank 0 is not part of group",
        "(<<dist.broadcast_object_list(>>); rank 0 then waited in barrier #1 at <<dist.barrier()>>.",
    ],
    "messages.world_of_four": [
        "init_process_group waits for 4 ranks, of which 2 were started: rank 0 is in init_process_group as rank 0 of 4",
        "(<<dist.init_process_group(>>)",
        LAUNCHER,
    ],
    "messages.everyone_is_rank_0": [
        "Ranks join the default group as the same rank: rank 0 is in init_process_group as rank 0 of 2",
        "rank 1 is in init_process_group as rank 0 of 2 (<<dist.init_process_group(>>).",
        LAUNCHER,
    ],
    "messages.port_of_another_job": [
        "rank 0 is in init_process_group as rank 0 of 2 at tcp://localhost:",
        "(<<dist.init_process_group(>>)",
        "→ Check that all ranks reach this address and that no other job uses it. Ranks of a launcher need no address",
    ],
    "messages.adapter_on_one_rank": [
        "Rank 0 has 4 params, while rank 1 has inconsistent 2 params.",
        "rank 0: parameter '1.weight' of shape [8, 8], float32, trained, strides [8, 1]; rank 1: nothing.",
        "(<<DistributedDataParallel(nn.Sequential(>>)",
    ],
    "messages.experts_as_units": [
        "rank 0 entered all_gather #28 of 144 B (float32 [36]) for experts.1 at <<model(torch.randn(4, 8), {0} if>>, "
        "rank 1",
        SAME_CALLS,
    ],
    "messages.checkpointed_twice": ["'layer.bias' is ready a second time", "use_reentrant=False", "static_graph=True"],
    "messages.graph_that_changes": [
        "'second.bias' got a gradient more often in the backward of step 2",
        "static_graph=False",
    ],
    "messages.part_of_the_outputs": [
        "2 of 4 parameters got no gradient in step 0 on rank",
        "Parameters which did not receive grad for rank 0: masks.weight, masks.bias",
        "find_unused_parameters=True",
    ],
}
QUICK = ["loops.loss_of_its_own"]


def _lines(file: Path, program: str, words: str) -> str:
    """The words, with the lines that they stand for."""
    source = file.read_text().splitlines()
    first = source.index(f"def {program}() -> None:")

    def line(found: re.Match[str]) -> str:
        own = [*range(first, len(source)), *range(first)]
        return f"{file}:{next(at for at in own if found[1] in source[at]) + 1}"

    return re.sub("<<(.*?)>>", line, words)


def _run(folder: Path, name: str) -> str:
    """What is said on stderr of a program."""
    file, _, program = name.partition(".")
    ranks = "4" if name == "messages.source_of_another_group" else "2"
    run = [sys.executable, "-m", "ddp_lab", "run", "--record", str(folder / "run"), "--standalone"]
    options = ["--nproc-per-node", ranks, "--on-hang", "stop", "--hang-seconds", "6"]
    command = [*run, *options, str(FOLDER / f"{file}.py"), program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.soak) for one in PROGRAMS]
)
def test_a_reported_program(tmp_path: Path, name: str) -> None:
    """The ranks are named, with their lines and a remedy."""
    file, _, program = name.partition(".")
    told = _run(tmp_path, name)
    words = [_lines(FOLDER / f"{file}.py", program, one) for one in PROGRAMS[name]]
    assert [one for one in words if one not in told] == [], told
    assert "Exception in thread ddp_lab" not in told


@pytest.mark.soak
def test_two_forwards_before_a_backward_train(tmp_path: Path) -> None:
    """With torch's class, the broadcast of buffers changes what the first one's backward needs."""
    assert _run(tmp_path, "messages.two_forwards") == ""
