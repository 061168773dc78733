"""Checks of lesson 10."""

from . import Checks, Prediction, Predictions

_NAMES = "The names are in the list above, and in `suspects`."


def runs_1_and_2(suspects, run_1, run_2, late_rank, late_bucket):
    if run_1 not in suspects or run_2 not in suspects:
        return f"Not yet: set run_1 and run_2 to the name of a suspect each. {_NAMES}"
    if run_1 == "late start":
        return "Not yet: in run 1 all ranks start their backward together (0 ms). Where do their bars diverge?"
    if run_1 == "slow rank":
        return (
            "Not yet: in run 1 the late rank is as fast as the others before and after that bucket: it loses time once."
        )
    if run_1 != "slow layer":
        return "Not yet: run 1 is not right. In the tab Stragglers, which rank did the others wait for?"
    if run_2 != "one bucket":
        return (
            "Not yet: run 1 is right, run 2 isn't. How many rows does a rank have there, and when is the first "
            "collective launched?"
        )
    if late_rank != 2:
        return (
            f"Not yet: rank {late_rank} is not late: its collectives take long because it waits. Which rank's bars "
            "have no hatched part?"
        )
    if late_bucket != 3:
        return (
            f"Not yet: the rank is right, but bucket {late_bucket} is not where it starts. Which bucket is filling for "
            "so long?"
        )
    return (
        "Right: in run 1 rank 2 loses 20 ms in bucket 3, that is in layer3, in every step, and the others wait for "
        "it.\nIn run 2 the only bucket is ready when the backward is over, so none of its communication can be hidden."
    )


def runs_3_and_4(suspects, run_3, run_4, late_rank):
    if run_3 not in suspects or run_4 not in suspects:
        return f"Not yet: set run_3 and run_4 to the name of a suspect each. {_NAMES}"
    if run_3 in ("slow layer", "slow rank"):
        return "Not yet: run 3's late rank is already late when its backward starts; then it is as fast as the others."
    if run_3 != "late start":
        return "Not yet: run 3 is not right. Are its collectives slow, or do three ranks wait in them for the fourth?"
    if run_4 != "slow link":
        return (
            "Not yet: run 3 is right, run 4 isn't. No rank is late there, and its buckets are those of run 0. Compare "
            "their GB/s."
        )
    if late_rank != 1:
        return f"Not yet: it is not rank {late_rank}. Which rank's backward starts last in run 3? Tick “whole step”."
    return (
        "Right: in run 3 rank 1 starts its backward some 30 ms after the others: its next batch took long. They wait "
        "in bucket 0.\nIn run 4 the same buckets take many times as long as in run 0, on all ranks: the network is "
        "slow."
    )


def runs_5_and_6(suspects, run_5, run_6, parameter):
    if run_5 not in suspects or run_6 not in suspects:
        return f"Not yet: set run_5 and run_6 to the name of a suspect each. {_NAMES}"
    if run_5 == "slow link":
        return (
            "Not yet: in run 5 bucket 0 is as fast as in run 0 (GB/s), and the other buckets wait behind it. "
            "What does it contain?"
        )
    if run_5 != "unused parameters":
        return (
            "Not yet: run 5 is not right. How large is bucket 0, and what does it contain? See the tab Buckets, or "
            "click the bucket."
        )
    if run_6 == "slow link":
        return "Not yet: in run 6 a bucket of 1 KiB takes as long as one of 256 KiB. So are the bytes the cause?"
    if run_6 != "tiny buckets":
        return "Not yet: run 5 is right, run 6 isn't. How many buckets are there, and how large are they?"
    if parameter != "old_head.weight":
        return f"Not yet: a parameter {parameter!r} gets a gradient in every step, or does not exist."
    return (
        "Right: in run 5 no forward uses old_head.weight, and 24 of 25.8 MiB are sent for it; all other buckets wait "
        "behind them.\nIn run 6 each of 15 collectives costs 5 ms before a byte is sent, and they run one after the "
        "other."
    )


def backward_of_the_rank_at_fault(runs, ranks):
    first = {number: next(iter(run.findings()), None) for number, run in runs.items()}
    late = {number: one.rank for number, one in first.items() if one is not None and one.rank is not None}
    longest = [ranks[number][rank] > 1.05 * ranks[number].drop(rank).max() for number, rank in late.items()]
    return "yes, it has the longest backward" if any(longest) else "no, the others' backward is at least as long"


def faults_found(first):
    kinds = ("straggler", "bucket-too-big", "straggler", "communication-bound", "unused-parameters", "bucket-too-small")
    findings = [first[f"run {number}"] for number in range(1, 7)]
    found = {kind for kind, one in zip(kinds, findings, strict=True) if one is not None and one.kind == kind}
    if found == {"straggler"}:
        return "in the two in which a single rank is at fault"
    return "in all six" if found == set(kinds) else "in the four in which no single rank is at fault"


def report_about_rank_0(answers):
    [about] = [str(one) for one in answers[-1].ranks if one.rank == 0]
    if "waits" in about:
        return "it waits for a bucket"
    return "it computes its backward" if "comput" in about else "nothing"


check = Checks(runs_1_and_2, runs_3_and_4, runs_5_and_6)

predictions = Predictions(
    Prediction(
        ["yes, it has the longest backward", "no, the others' backward is at least as long"],
        backward_of_the_rank_at_fault,
    ),
    Prediction(
        [
            "in all six",
            "in the two in which a single rank is at fault",
            "in the four in which no single rank is at fault",
        ],
        faults_found,
    ),
    Prediction(["it waits for a bucket", "it computes its backward", "nothing"], report_about_rank_0),
)
predict, compare = predictions.predict, predictions.compare
