"""Checks of lesson 2."""

import json
import socket
import tempfile
from pathlib import Path

from . import Checks, Prediction, Predictions, on_ranks

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_TELLS = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {_VARIABLES}}}))"
_ADDS_UP = """
import datetime
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.tensor(10 ** dist.get_rank())
dist.all_reduce(total)
print(total.item())
dist.destroy_process_group()
"""


def free_port():
    """A port that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def divided_ranks(torch, dist, rank, world_size, layout):
    for size, per_host in ((8, 4), (6, 2), (3, 3)):
        try:
            found = tuple(layout(size, per_host))
        except Exception as error:  # noqa: BLE001 (the reader's own, shown in the verdict)
            return f"Not yet: layout({size}, {per_host}) raises {type(error).__name__}: {error}."
        ranks = list(range(size))
        wanted = ([ranks[i : i + per_host] for i in ranks[::per_host]], [ranks[i::per_host] for i in range(per_host)])
        if found == wanted[::-1] != wanted:
            return "Not yet: these are the right groups, but return `hosts` first and `places` second."
        for kind, groups, right in zip(("hosts", "places"), found, wanted, strict=True):
            members = sorted(member for group in groups for member in group)
            if members != ranks:
                why = "Every rank must be in exactly one group of each kind."
                return f"Not yet: with {size} ranks, {per_host} on each host, `{kind}` is {groups}. {why}"
            if sorted(map(sorted, groups)) != right:
                counts = f"{len(groups)} group{'s' * (len(groups) != 1)}, but there are {len(right)} {kind}"
                why = counts if len(groups) != len(right) else f"{groups}, and rank 0 should be with {right[0][1:]}"
                return f"Not yet: with {size} ranks, {per_host} on each host, `{kind}` has {why}."
    total = torch.tensor([10.0**rank])
    made = [(members, dist.new_group(members, backend="gloo")) for members in layout(world_size, 1)[1]]
    for members, group in made:
        if rank in members:
            dist.all_reduce(total, group=group)
    return f"Right: on your ranks, each its own host, the group of the one place adds up to {total.item():.0f}."


def launcher(launch):
    with tempfile.TemporaryDirectory() as folder:
        tells, adds_up, port = Path(folder, "tells.py"), Path(folder, "adds_up.py"), free_port()
        tells.write_text(_TELLS)
        adds_up.write_text(_ADDS_UP)
        try:
            outputs = launch(tells, 3, port)
        except TypeError as error:
            return f"Not yet: launch() raised TypeError: {error}. The values of environment variables are strings."
        if not outputs:
            return f"Not yet: launch() returned {outputs!r}. Return what each process printed."
        try:
            told = [json.loads(printed.splitlines()[-1]) for printed in outputs]
        except (IndexError, json.JSONDecodeError):
            return "Not yet: a process printed something else than its script. Start `command` for each rank."
        missing = [name for name in _VARIABLES if any(variables[name] is None for variables in told)]
        if missing:
            return f"Not yet: the processes were started without {', '.join(missing)}."
        numbers = [variables["RANK"] for variables in told]
        if len(numbers) != 3 or sorted(numbers) != ["0", "1", "2"]:
            return f"Not yet: of 3 processes the numbers are {', '.join(numbers)}. Each rank needs its own, from 0."
        for name, wanted in (("WORLD_SIZE", "3"), ("MASTER_PORT", str(port)), ("MASTER_ADDR", "127.0.0.1")):
            if any(variables[name] != wanted for variables in told):
                return f"Not yet: {name} is {told[0][name]!r}, but should be {wanted!r}, the same on all ranks."
        sums = [printed.strip().splitlines()[-1] for printed in launch(adds_up, 2, free_port())]
    if sums != ["11", "11"]:
        return f"Not yet: the variables are right, but the processes end with {sums}."
    return "Right: your processes found each other, and an all-reduce gave 1 + 10 = 11 on both."


def larger_advantage(times):
    small, large = (times["gloo"][place] / times["shm"][place] for place in (0, -1))
    if 0.8 < small / large < 1.25:
        return "by about the same factor for both"
    return "for 4 bytes" if small > large else "for 4 MiB"


def number_outside(dist, group):
    try:
        number = dist.get_rank(group)
    except (RuntimeError, ValueError):
        return "an error"
    return {None: "None", -1: "−1"}.get(number, "its number among all ranks")


def what_torchrun_gives(told):
    addresses = {variables.get("MASTER_ADDR") for variables in told.values()} - {None}
    if len(addresses) > 1:
        return "the addresses of all processes"
    own = all(variables.get("RANK") == str(rank) for rank, variables in told.items())
    count = all(variables.get("WORLD_SIZE") == str(len(told)) for variables in told.values())
    return "one address, its number and the number of processes" if addresses and own and count else "only its number"


def early_get(lab):
    [found] = lab.pull("found", ranks=[1]).values()
    if isinstance(found, Exception):
        return "get raises an error"
    return "get waits for the key" if bytes(found) == b"hello" else "get returns an empty value"


check = Checks(on_ranks(divided_ranks), launcher)

predictions = Predictions(
    Prediction(["for 4 bytes", "for 4 MiB", "by about the same factor for both"], larger_advantage),
    Prediction(["its number among all ranks", "−1", "None", "an error"], number_outside, on_ranks=True),
    Prediction(
        [
            "the addresses of all processes",
            "one address, its number and the number of processes",
            "only its number",
        ],
        what_torchrun_gives,
    ),
    Prediction(["get raises an error", "get returns an empty value", "get waits for the key"], early_get),
)
predict, compare = predictions.predict, predictions.compare
