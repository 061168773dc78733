"""Checks of lesson 12."""

from itertools import pairwise

from . import Checks, on_ranks


def efficiency_of_n(lab, efficiency):
    tried = (1, 2, 16, 256)
    step = {n: lab.simulate(world_size=n).step_ms for n in tried}

    def is_like(formula):
        return all(abs(efficiency(n) / formula(n) - 1) < 1e-3 for n in tried)

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
    return f"Not yet: {wanted}. Yours are {efficiency(1):.3g} and {efficiency(16):.3g}."


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


check = Checks(efficiency_of_n, on_ranks(groups_in_turn))
