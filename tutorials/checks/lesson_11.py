"""Checks of lesson 11."""

from . import Checks


def uneven_batches(lab):
    totals = lab.pull("float(total)")
    if set(totals.values()) == {7.0}:
        return "Right: 7 on both ranks."
    if set(totals.values()) == {6.0}:
        return "Not yet: 6 on both ranks. Rank 1's last batch was not counted."
    return f"Not yet: the totals are {totals}. Both should be 7."


def which_rank_and_where(lab, stuck_rank, stuck_in):
    true_rank, true_place = lab.pull("fault")[0]
    if stuck_rank is None or stuck_in is None:
        return "Not yet: write a number and a name into the cell above, stuck_rank and stuck_in, and run it."
    if stuck_rank != true_rank:
        return f"Not yet: rank {stuck_rank} waits in a collective. Which rank does it wait for?"
    if stuck_in != true_place:
        return f"Not yet: rank {stuck_rank} is right, {stuck_in} is not. In its stack, which line calls wait_a_little?"
    return f"Right: rank {true_rank} never returns from {true_place}."


check = Checks(uneven_batches, which_rank_and_where)
