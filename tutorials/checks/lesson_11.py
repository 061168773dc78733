"""Checks of lesson 11."""

import re

from . import Checks, Prediction, Predictions


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


def named_first(busy):
    [rank] = re.findall(r"rank (\d)", busy.diagnosis.sentence)[:1]
    return {"0": "rank 0, which waits", "1": "rank 1, which is busy"}[rank]


def completed_calls(different):
    waiting = {one.rank for one in different.ranks if one.waits}
    return {0: "yes, on both ranks", 1: "only on one rank", 2: "on neither rank"}[len(waiting)]


def detection(apart):
    found = apart.diagnosis.kind == "mismatch" and not all(one.waits for one in apart.ranks)
    return "yes, although no rank waits" if found else "no, only once a rank waits"


def first_step_after(continued_at):
    return {0: "at step 0, with new weights", 7: "at step 7", 8: "at step 8"}[continued_at]


check = Checks(uneven_batches, which_rank_and_where)

predictions = Predictions(
    Prediction(["rank 0, which waits", "rank 1, which is busy"], named_first),
    Prediction(["yes, on both ranks", "only on one rank", "on neither rank"], completed_calls),
    Prediction(["yes, although no rank waits", "no, only once a rank waits"], detection),
    Prediction(["at step 0, with new weights", "at step 7", "at step 8"], first_step_after, on_ranks=True),
)
predict, compare = predictions.predict, predictions.compare
