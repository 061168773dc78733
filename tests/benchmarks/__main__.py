"""`python -m tests.benchmarks NAME [OPTIONS]`, from the root of a clone."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ddp_lab.bench.measuring import command
from ddp_lab.command_line import Parser
from ddp_lab.errors import DdpLabError

BENCHMARKS = {
    "cell": "round trip of a trivial cell: %%distributed against %%px",
    "construct": "the constructor: our DistributedDataParallel against torch's",
    "dashboard": "what recording and an open dashboard cost the training",
    "events": "cost of recording an event, and its way to the client",
    "memory": "peak memory of gradients and buckets: ours against torch's",
    "observe": "training step of torch's DistributedDataParallel, fully_shard or HSDP: observed against not",
    "output": "ranks that print without pause, in Chromium: is the page usable, is a line lost?",
    "page": "the dashboard's page alone in Chromium: what an update costs the browser",
    "predicted-memory": "peak memory of DDP, ZeRO-1 and fully_shard: predicted from a DDP run, and measured",
    "push": "an array to all ranks and back: shared memory, messages, plain ipyparallel, a copy",
    "recovery": "interrupt, error or death of a rank: until control is back, and until a collective works again",
    "stragglers": "delays injected into random ranks and layers: are they named, and nobody else?",
    "timeline": "answers and memory of a timeline of a million events",
    "trace": "how long Timeline.to_perfetto takes",
    "tune": "tuned buckets against torch's default ones and against the best of a grid",
    "what-if": "predicted steps against measured ones, over bucket size limits, models and world sizes",
    "widget": "the dashboard in Chromium: updates per second, and from event to drawn pixel",
}


def run(name: str, argv: Sequence[str]) -> int:
    """Runs one benchmark: a module with OPTIONS, a function `measure` with parameters of their names, and `table`."""
    benchmark = importlib.import_module(f"tests.benchmarks.{name.replace('-', '_')}")
    program = f"python -m tests.benchmarks {name}"
    try:
        return command.run(program, benchmark.__doc__, benchmark.measure, benchmark.table, benchmark.OPTIONS, argv)
    except DdpLabError as error:  # what it needs is missing
        sys.stderr.write(f"{error}\n")
        return 1


def main(argv: list[str]) -> int:
    """Runs one benchmark; returns its exit code."""
    parser = Parser(
        prog="python -m tests.benchmarks",
        usage="python -m tests.benchmarks [-h] NAME [OPTIONS]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(f"  {name:16} {what}" for name, what in BENCHMARKS.items()),
        examples=("python -m tests.benchmarks recovery", "python -m tests.benchmarks push --json push.json"),
    )
    parser.add_argument("name", choices=sorted(BENCHMARKS), metavar="NAME")
    given = parser.parse_args(argv[:1])
    return run(given.name, argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
