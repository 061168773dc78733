"""Checks of lesson 12."""

import math
from itertools import pairwise
from pathlib import Path

from . import Checks, Prediction, Predictions, on_ranks

_SHARED = {  # the nearest first; the files in which Linux lists it for each processor
    "core": "topology/core_cpus_list",
    "L2 cache": "cache/index2/shared_cpu_list",
    "L3 cache": "cache/index3/shared_cpu_list",
    "NUMA node": "node*/cpulist",
    "socket": "topology/package_cpus_list",
}


def nearest_shared(cpus):
    """For each processor a row: the nearest thing that it shares with each of the processors."""
    return [_row(cpu, cpus) for cpu in cpus]


def _row(cpu, others):
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}")
    sharing = {name: _members("".join(file.read_text() for file in folder.glob(at))) for name, at in _SHARED.items()}
    sharing = {"itself": {cpu}, **sharing, "machine": set(others)}
    return [next(name for name in sharing if other in sharing[name]) for other in others]


def _members(text):
    """The numbers that a list such as "0-2,8" contains."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}


def efficiency_of_n(lab, efficiency):
    tried = (1, 2, 16, 256)
    step = {n: lab.simulate(world_size=n).step_ms for n in tried}
    yours = {n: efficiency(n) for n in tried} if callable(efficiency) else {}
    if not yours or not all(isinstance(one, int | float) for one in yours.values()):
        return "Not yet: efficiency should be a function that returns a number. Does it end with `return`?"

    def is_like(formula):
        return all(abs(yours[n] / formula(n) - 1) < 1e-3 for n in tried)

    if is_like(lambda n: step[1] / step[n]):
        left = step[1] / step[256]
        return (
            f"Right: on 256 ranks the efficiency is {left:.0%}. They do the work of {256 * left:.0f}, at this "
            "network's speed."
        )
    if is_like(lambda n: 1.0):
        return "Not yet: efficiency(n) is 1 for every n. Compare a step on one rank with a step on n."
    if is_like(lambda n: step[n] / step[1]):
        return "Not yet: the fraction is upside down. A longer step must give a smaller efficiency."
    if is_like(lambda n: step[1] / step[n] / n):
        return "Not yet: n ranks do n times the work, and a step ideally takes no longer: don't divide by n."
    if is_like(lambda n: step[1] / step[n] * n):
        return "Not yet: that is how many times as fast they are. Which fraction of the ideal, n times, is it?"
    wanted = f"efficiency(1) should be 1, efficiency(16) {step[1] / step[16]:.3g}"
    return f"Not yet: {wanted}. Yours are {yours[1]:.3g} and {yours[16]:.3g}."


def groups_in_turn(torch, dist, world_size, wrapped, train, groups, in_turn):
    chosen, all_reduce = [], dist.all_reduce

    def note(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):  # over one group: no rank waits in another
        chosen.append(next((number for number, one in enumerate(groups) if one is group), "none of groups"))
        return all_reduce(tensor, op, async_op=async_op)

    plain, other = wrapped(), wrapped()
    other.register_comm_hook(groups, in_turn)
    train(plain, steps=2)
    dist.all_reduce = note
    try:
        train(other, steps=2)
    except Exception as error:  # noqa: BLE001 (the reader's own, shown in the verdict)
        return f"Not yet: the hook failed with {type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        dist.all_reduce = all_reduce
    by_rank = [None] * world_size
    dist.all_gather_object(by_rank, chosen)
    if any(one != by_rank[0] for one in by_rank):
        told = f"for the same buckets one rank chooses groups {by_rank[0][:4]}, another {by_rank[-1][:4]}"
        return f"Not yet: {told}. They must choose the same group."
    unused = set(range(len(groups))) - set(chosen)
    if unused or len(set(chosen)) != len(groups):
        return f"Not yet: of groups 0, 1 and 2 these were never used: {sorted(unused)}."
    turns = chosen[-len(other.buckets()) :]
    if any((after - before) % len(groups) != 1 for before, after in pairwise(turns)):
        why = "Each should go to the next group, after the last one to the first."
        return f"Not yet: the buckets of a step went to groups {turns}. {why}"
    if not all(
        torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in zip(plain.parameters(), other.parameters(), strict=True)
    ):
        return "Not yet: the groups alternate, but the gradients are no longer the averages over the ranks."
    return f"Right: the buckets of a step went to groups {turns}."


def four_ranks(table):
    ratio = table["recorded, 4 ranks"]["step"] / table["recorded, 2 ranks"]["step"]
    choices = {"as long": 1, "about twice as long": 2, "about four times as long": 4}
    return min(choices, key=lambda choice: abs(math.log(ratio / choices[choice])))


def longer_part(steps):
    growth = steps[256] - steps[1]
    parts = {
        "the forward": growth["forward"],
        "the backward's computation": growth["compute"],
        "exposed communication": growth["exposed"],
        "the rest": growth["other"],
    }
    return max(parts, key=parts.get)


def size_of_buckets(best):
    return "larger" if best[256] > best[2] else "smaller" if best[256] < best[2] else "of the same size"


def network(step_ms):
    _, wide, near = step_ms.values()
    return "ten times the bandwidth" if wide < near else "a tenth of the latency"


def slowed_down(ends):
    return "ResNet50" if ends["ResNet50", "nccl"] > ends["BERT", "nccl"] else "BERT"


def side(measured, simulated):
    def middle(values):
        return sorted(values)[len(values) // 2]

    left, right = 1 - middle(measured["rr5"]) / middle(measured["rr1"]), 1 - simulated["rr5"] / simulated["rr1"]
    if min(left, right) > 0.1:
        return "on both"
    return "on the left, measured here" if left > right else "on the right, simulated"


check = Checks(efficiency_of_n, on_ranks(groups_in_turn))

predictions = Predictions(
    Prediction(["as long", "about twice as long", "about four times as long"], four_ranks),
    Prediction(["the forward", "the backward's computation", "exposed communication", "the rest"], longer_part),
    Prediction(["larger", "smaller", "of the same size"], size_of_buckets),
    Prediction(["ten times the bandwidth", "a tenth of the latency"], network),
    Prediction(["ResNet50", "BERT"], slowed_down),
    Prediction(["on the left, measured here", "on the right, simulated", "on both"], side),
)
predict, compare = predictions.predict, predictions.compare
