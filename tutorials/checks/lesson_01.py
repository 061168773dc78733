"""Checks of lesson 1."""

from . import Checks


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

    scans = load_digits().data
    means, wanted = lab.pull("float(mean)"), scans.mean()
    mean_of_means = (scans[:1000].mean() + scans[1000:].mean()) / 2
    if all(abs(mean - wanted) < 1e-4 for mean in means.values()):
        return f"Right: {wanted:.6f} on every rank."
    if len(set(means.values())) > 1:
        return (
            f"Not yet: the ranks disagree ({means}). Nothing was exchanged, or only in one direction. Which "
            "collective adds up?"
        )
    if all(abs(mean - mean_of_means) < 1e-4 for mean in means.values()):
        return (
            f"Not yet: {mean_of_means:.6f} is the mean of the two means. Rank 0 has more images, so it must count "
            "for more."
        )
    return f"Not yet: every rank has {means[0]:.6f}, but it should be {wanted:.6f}. Which two sums make a mean?"


check = Checks(divided_work, mean_over_unequal_shares)
