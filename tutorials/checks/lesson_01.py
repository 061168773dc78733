"""Checks of lesson 1."""

import sys

import ddp_lab

from . import Checks, Prediction, Predictions


def divided_work(lab):
    parts, wanted = lab.pull("int(part)"), sum(range(1, 1001))
    if set(parts.values()) == {wanted}:
        return "Not yet: every rank added up all 1000 numbers. Take a slice: numbers[first::every]."
    if sum(parts.values()) != wanted:
        return f"Not yet: the parts are {parts}. Together they are {sum(parts.values())}, but should be {wanted}."
    if 0 in parts.values():
        return (
            f"Not yet: the parts are {parts}. One rank does all the work: give each rank about the same number of "
            "numbers."
        )
    if len(set(parts.values())) == 1:
        return f"Not yet: {parts[0]} on every rank is the whole sum, divided. Divide the numbers, not their sum."
    return f"Right: {' + '.join(map(str, parts.values()))} = {wanted}. Every number was added by one rank."


def mean_over_unequal_shares(lab):
    from sklearn.datasets import load_digits

    images = load_digits().data
    means, wanted = lab.pull("float(mean)"), images.mean()
    mean_of_means = (images[:1000].mean() + images[1000:].mean()) / 2
    if all(abs(mean - wanted) < 1e-4 for mean in means.values()):
        return f"Right: {wanted:.6f} on every rank."
    if len(set(means.values())) > 1:
        return (
            f"Not yet: the ranks disagree ({means}). Nothing was exchanged, or only in one direction. Which "
            "collective sums?"
        )
    if all(abs(mean - mean_of_means) < 1e-4 for mean in means.values()):
        return (
            f"Not yet: {mean_of_means:.6f} is the mean of the two means. Rank 0 has more images, so it must count "
            "for more."
        )
    return f"Not yet: every rank has {means[0]:.6f}, but it should be {wanted:.6f}. Which two sums make a mean?"


def lines_shown(lab):
    result = lab.last_result
    if result is None or "hello from a cell" not in result.text(0):
        return "Not yet: run the cell above once more, then this one."
    lines = [line for rank in result.outputs for line in result.text(rank).splitlines()]
    return str(len(set(lines)))  # lines that ranks print alike appear once


def ranks_with_the_total(lab):
    parts, totals = lab.pull("int(part)"), lab.pull("int(total)")
    have = [rank for rank, total in totals.items() if total == sum(parts.values())]
    if not have:
        return "neither of them"
    return "both ranks" if len(have) == len(totals) else f"only rank {have[0]}"


def fate_of_rank_0(lab):
    error = getattr(sys, "last_value", None)  # what the cell has raised
    if not isinstance(error, ddp_lab.CellError) or "shoelaces" not in str(error):
        return "Not yet: run the cell above once more, then this one."
    if 0 in lab.lost():
        return "its process ends as well"
    if 0 not in error.failures:
        return "it continues with its own value"
    timed_out = "timed out" in error.failures[0].message.lower()
    return "it waits until its timeout" if timed_out else "its cell ends with an error"


check = Checks(divided_work, mean_over_unequal_shares)

predictions = Predictions(
    Prediction(["3", "5", "6"], lines_shown),
    Prediction(["only rank 0", "both ranks", "neither of them"], ranks_with_the_total),
    Prediction(
        [
            "it waits until its timeout",
            "it continues with its own value",
            "its cell ends with an error",
            "its process ends as well",
        ],
        fate_of_rank_0,
    ),
)
predict, compare = predictions.predict, predictions.compare
