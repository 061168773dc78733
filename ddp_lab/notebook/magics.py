"""The magics `%cluster`, `%%distributed`, `%push` and `%pull`: they parse a line and make one call."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from IPython.core.error import UsageError

from ..cluster.cells.failures import marked
from ..cluster.processes.host_commands import ENGINES
from ..control.records import CellText
from ..errors import ClusterError
from ..formatting import parse_ranks
from . import brief_errors, commands, completion, syntax

__all__ = ["load", "unload"]

_PARTS = (brief_errors, completion)
_Handler = Callable[[Any, argparse.Namespace, str], Any]


def load(shell: Any) -> None:
    """Registers the magics with an IPython shell."""
    for name, (kind, parser, run) in _MAGICS.items():
        shell.register_magic_function(_magic(shell, parser, run), kind, name)
    for part in _PARTS:
        part.load(shell)


def unload(shell: Any) -> None:
    """Stops the current cluster and takes the magics away."""
    commands.stop_quietly()
    for part in _PARTS:
        part.unload(shell)
    for name, (kind, _, _) in _MAGICS.items():
        shell.magics_manager.magics[kind].pop(name, None)


def _magic(shell: Any, parser: _Parser, run: _Handler) -> Callable[..., Any]:
    """Makes a magic, which runs with what its line says; `%cluster?` shows its help and this file."""

    def magic(line: str, cell: str = "") -> Any:
        options = parser.parse_line(line)
        if options is None:
            return None
        with _brief_errors():
            return run(shell, options, cell)

    magic.__doc__ = parser.format_help()
    return magic


def _cluster(shell: Any, options: argparse.Namespace, cell: str) -> None:
    options.call(options)


def _start(options: argparse.Namespace) -> None:
    if options.lease is not None and not options.detach:
        raise UsageError("%cluster start: --lease is for --detach")
    names = ("n", "devices", "backend", "hosts", "name", "detach", "engines", "python", "address")
    given = {name: getattr(options, name) for name in names}
    if options.lease is not None:
        given["lease_seconds"] = options.lease
    commands.start(env=dict(options.env), **given)


def _distributed(shell: Any, options: argparse.Namespace, cell: str) -> None:
    number = len(shell.history_manager.input_hist_raw) - 1  # execution_count counts on before the cell runs
    name = options.name or "%%distributed"
    label = f"{name} [{number}]" if number > 0 else name
    text = CellText(cell, first_line=2, name=options.name)
    syntax.check(shell, text, label)
    commands.run_cell(
        text,
        cluster_name=options.cluster,
        ranks=options.ranks,
        label=label,
        timeout=options.timeout,
        watch=options.watch,
        wait=not options.no_wait,
        quiet=options.quiet,
    )


def _push(shell: Any, options: argparse.Namespace, cell: str) -> None:
    missing = [name for name in options.names if name not in shell.user_ns]
    if missing:
        raise UsageError(f"%push: no variable {', '.join(missing)} in this notebook")
    commands.current().push({name: shell.user_ns[name] for name in options.names}, options.ranks)


def _pull(shell: Any, options: argparse.Namespace, cell: str) -> Any:
    pulled = [commands.pull(name, options.ranks) for name in options.names]
    shell.push({name: value for name, value in zip(options.names, pulled, strict=True) if name.isidentifier()})
    return pulled[0] if len(pulled) == 1 else tuple(pulled)


@contextlib.contextmanager
def _brief_errors() -> Iterator[None]:
    """Shows what the user can act on without the frames of this package."""
    try:
        yield
    except ClusterError as error:
        lines = [f"{marked(type(error).__name__)}: {error}"]
        error._render_traceback_ = lambda: "\n".join(lines).splitlines()  # type: ignore[attr-defined]
        raise
    except (ValueError, TypeError, NameError) as error:
        raise UsageError(str(error)) from error


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are `UsageError`s that name the option and what is valid."""

    def __init__(self, prog: str, description: str, **options: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)

    def parse_line(self, line: str) -> argparse.Namespace | None:
        """The options of a magic's line; None if it asked for help, which has been printed."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.error(f"{error} in {line!r}")
        try:
            return self.parse_args(words)
        except SystemExit:  # --help
            return None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses an unknown option where it stands: a command's parser knows which ones it has."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            close = difflib.get_close_matches(unknown[0].split("=")[0], self._option_string_actions, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unknown {'option' if unknown[0].startswith('-') else 'argument'} {unknown[0]}{hint}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Raises a `UsageError` that also says how it is used."""
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise UsageError(f"{self.prog}: {message}\nusage: {usage}")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks (1, 2, ...)")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds (for example 30 or 0.5)")
    return seconds


def _ranks(text: str) -> list[int]:
    try:
        return list(parse_ranks(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _devices(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not name devices (for example 0,2)") from None


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _add_ranks(
    parser: argparse.ArgumentParser, option: str = "--ranks", text: str = "these ranks only (default: all)"
) -> None:
    parser.add_argument(option, type=_ranks, metavar="0,2-3", help=text)


def _cluster_parser() -> _Parser:
    parser = _Parser("%cluster", "Starts, shows and ends the cluster that %%distributed cells run on.")
    parsers = parser.add_subparsers(dest="command", metavar="command")

    def add(name: str, text: str, call: Any) -> argparse.ArgumentParser:
        made = parsers.add_parser(name, description=text, help=text.replace("%", "%%"))
        made.set_defaults(call=call)
        return made

    _add_starts_options(add("start", "Starts ranks and returns when all have finished a collective.", _start))
    use = add(
        "use",
        "Makes a running cluster of this notebook the current one: %%distributed cells run on it.",
        lambda options: commands.use(options.name),
    )
    use.add_argument("name", metavar="NAME", help="as `%%cluster list` shows it")
    attach = add(
        "attach",
        "Finds a detached cluster again: variables are kept, cells have run on.",
        lambda options: commands.attach(options.name, options.take_over),
    )
    attach.add_argument("name", nargs="?", metavar="NAME", help="which (default: the only one)")
    attach.add_argument("--take-over", action="store_true", help="send a notebook away that is attached")
    rejoin = add(
        "rejoin",
        "Gives the ranks new process groups, and those that have ended new processes; variables are kept.",
        lambda options: commands.on_current("rejoin", commands.rejoin, options.replace or ()),
    )
    _add_ranks(rejoin, "--replace", "end the processes of these ranks first, whatever they do")
    add(
        "list",
        "Lists the clusters of this notebook, the current one first, and the detached clusters of this user.",
        lambda _: commands.list_clusters(),
    )
    for name, (text, verb, do) in _ON_CURRENT.items():
        add(name, text, functools.partial(lambda verb, do, _: commands.on_current(verb, do), verb, do))
    parser.set_defaults(call=lambda _: commands.on_current("show", commands.status))
    return parser


# command -> what it does, and how that is called where there is no cluster
_ON_CURRENT = {
    "status": ("Shows every rank: state, device, process.", "show", commands.status),
    "stop": ("Ends all ranks and their processes.", "stop", commands.stop),
    "restart": ("Replaces every rank's process by a new one; variables are gone.", "restart", commands.restart),
    "interrupt": ("Raises KeyboardInterrupt in the cells that run.", "interrupt", commands.interrupt),
    "detach": ("Lets go of a detached cluster; its ranks and their cells go on.", "leave", commands.detach),
    "results": (
        "Lists the cells that were named with `%%distributed --name NAME`, and what came of them.",
        "list",
        commands.results,
    ),
    "doctor": (
        "Says why the ranks do not come on: what each of them does, who waits for whom, what helps.",
        "examine",
        commands.doctor,
    ),
}


def _add_starts_options(start: argparse.ArgumentParser) -> None:
    start.add_argument("-n", type=_count, metavar="N", help="number of ranks (default: one per GPU, else 2)")
    start.add_argument("--devices", type=_devices, metavar="0,2", help="which GPUs (default: all)")
    start.add_argument(
        "--env",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the ranks; may be repeated",
    )
    start.add_argument(
        "--backend",
        choices=["auto", "nccl", "gloo", "shm", "mpi"],
        default="auto",
        help="of the process group (default: auto)",
    )
    start.add_argument(
        "--hosts",
        metavar="a:4,b:4",
        help="hosts and their numbers of ranks; localhost is this machine, allocation what a batch system has given to "
        "this job (default: this machine alone; with --engines of a batch system, the allocation)",
    )
    start.add_argument(
        "--engines", choices=ENGINES, default="ssh", help="what starts ranks on other hosts (default: ssh)"
    )
    start.add_argument("--python", metavar="PATH", help="the Python on other hosts (default: the path of this one)")
    start.add_argument("--address", metavar="IP", help="this machine's address that the hosts reach (default: found)")
    start.add_argument("--detach", action="store_true", help="the ranks outlive this notebook, until %%cluster stop")
    start.add_argument(
        "--name", metavar="NAME", help="tells it from other clusters; `%%cluster attach NAME` finds a detached one"
    )
    start.add_argument(
        "--lease",
        type=_seconds,
        metavar="S",
        help="seconds that a detached cluster lives while no notebook is attached (default: 3600)",
    )


def _distributed_parser() -> _Parser:
    parser = _Parser("%%distributed", "Runs the cell on the ranks; starts a cluster with defaults if none runs.")
    parser.add_argument("--cluster", metavar="NAME", help="on this cluster of the notebook (default: the current one)")
    _add_ranks(parser)
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="interrupt the ranks after S seconds")
    parser.add_argument("--watch", action="store_true", help="show the dashboard above the output")
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="give the prompt back at once; the cell goes on, and its end is shown here",
    )
    parser.add_argument("--name", default="", metavar="NAME", help="the cell's name in tracebacks and in `lab.results`")
    parser.add_argument("--quiet", action="store_true", help="show no outputs, only errors")
    return parser


def _names_parser(prog: str, description: str, names: str) -> _Parser:
    parser = _Parser(prog, description)
    parser.add_argument("names", nargs="+", metavar="NAME", help=names)
    _add_ranks(parser)
    return parser


_MAGICS = {
    "cluster": ("line", _cluster_parser(), _cluster),
    "distributed": ("cell", _distributed_parser(), _distributed),
    "push": (
        "line",
        _names_parser("%push", "Sets variables of this notebook on the ranks.", "variable of this notebook"),
        _push,
    ),
    "pull": (
        "line",
        _names_parser(
            "%pull",
            "Gets variables from the ranks, binds them here and returns them: a dict by rank, or the value itself when "
            "--ranks names a single rank. Tensors come as tensors if this notebook has imported torch, else as numpy "
            "arrays; models and optimizers as their state_dict().",
            "variable of the ranks, or an expression without spaces",
        ),
        _pull,
    ),
}
"""Name -> kind, parser of its line, and what it does."""
