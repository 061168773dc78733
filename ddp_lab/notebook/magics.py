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
from ..cluster.processes import early
from ..cluster.processes.host_commands import LAUNCHERS
from ..control.records import CellText
from ..errors import CellError, DdpLabError
from ..formatting import parse_ranks
from ..renamed import former_options
from . import brief_errors, commands, completion, debugger, syntax

__all__ = ["load", "unload"]

_PARTS = (brief_errors, completion, debugger)
_Handler = Callable[[Any, argparse.Namespace, str], Any]


def load(shell: Any) -> None:
    """Registers the magics with an IPython shell."""
    for name, (kind, parser, run) in _MAGICS.items():
        shell.register_magic_function(_magic(shell, parser, run), kind, name)
    for part in _PARTS:
        part.load(shell)


def unload(shell: Any) -> None:
    """Stops the current cluster and removes the magics."""
    commands.stop_quietly()
    early.end()
    for part in _PARTS:
        part.unload(shell)
    for name, (kind, _, _) in _MAGICS.items():
        shell.magics_manager.magics[kind].pop(name, None)


def _magic(shell: Any, parser: _Parser, run: _Handler) -> Callable[..., Any]:
    """Makes a magic, which runs with its line's options; `%cluster?` shows its help and this file."""

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
    if options.idle_timeout is not None and not options.detach:
        raise UsageError("%cluster start: --idle-timeout requires --detach")
    names = ("n", "devices", "backend", "hosts", "name", "detach", "launcher", "python", "client_address")
    given = {name: getattr(options, name) for name in names}
    if options.idle_timeout is not None:
        given["idle_timeout"] = options.idle_timeout
    commands.start(env=dict(options.env), **given)


def _distributed(shell: Any, options: argparse.Namespace, cell: str) -> None:
    number = len(shell.history_manager.input_hist_raw) - 1  # execution_count increases before the cell runs
    name = options.name or "%%distributed"
    label = f"{name} [{number}]" if number > 0 else name
    text = _text_of(shell, cell, options.name)
    syntax.check(shell, text, label)
    commands.run_cell(
        text,
        cluster_name=options.cluster,
        ranks=options.ranks,
        label=label,
        timeout=options.timeout,
        dashboard=options.dashboard,
        wait=not options.no_wait,
        quiet=options.quiet,
    )


def _text_of(shell: Any, cell: str, name: str) -> CellText:
    """The cell with what is above it in the notebook: lines are counted there, and the debugger knows the whole."""
    request = shell.get_parent() if hasattr(shell, "get_parent") else {}
    whole = str((request or {}).get("content", {}).get("code", ""))
    body = cell if whole.endswith(cell) else cell.removesuffix("\n")  # IPython adds one
    above = whole.removesuffix(body)
    if not body or above == whole or not above.endswith("\n"):  # the magic was called by other code
        return CellText(cell, first_line=2, name=name)
    return CellText(body, first_line=above.count("\n") + 1, name=name, above=above)


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
    """Shows errors that the user can act on without the frames of this package."""
    try:
        yield
    except DdpLabError as error:
        if isinstance(error, CellError):  # it shows itself
            raise
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
        """Refuses an unknown option in its own parser, which knows the valid ones."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]  # without former names
            close = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unknown {'option' if unknown[0].startswith('-') else 'argument'} {unknown[0]}{hint}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Raises a `UsageError` with the usage."""
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


def _rank_or_off(text: str) -> int | str:
    if text == "off" or text.isdigit():
        return text if text == "off" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a rank (0, 1, ...) and not `off`")


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
    parser = _Parser("%cluster", "Starts, shows and stops the cluster that %%distributed cells run on.")
    parsers = parser.add_subparsers(dest="command", metavar="command")

    def add(name: str, text: str, call: Any) -> argparse.ArgumentParser:
        made = parsers.add_parser(name, description=text, help=text.replace("%", "%%"))
        made.set_defaults(call=call)
        return made

    _add_starts_options(add("start", "Starts ranks and returns when all have finished a first collective.", _start))
    use = add(
        "use",
        "Makes a running cluster of this notebook the current one: %%distributed cells run on it.",
        lambda options: commands.use(options.name),
    )
    use.add_argument("name", metavar="NAME", help="its name in `%%cluster list`")
    attach = add(
        "attach",
        "Attaches to a detached cluster: variables are kept, and cells have kept running.",
        lambda options: commands.attach(options.name, options.take_over),
    )
    attach.add_argument("name", nargs="?", metavar="NAME", help="name of the cluster (default: the only one)")
    attach.add_argument("--take-over", action="store_true", help="disconnect a notebook that is attached")
    rejoin = add(
        "rejoin",
        "Rebuilds the process groups and restarts failed ranks; variables of the other ranks are kept.",
        lambda options: commands.on_current("rejoin", commands.rejoin, options.replace or ()),
    )
    _add_ranks(rejoin, "--replace", "terminate and restart the processes of these ranks, whatever they do")
    add(
        "list",
        "Lists the clusters of this notebook, the current one first, and the detached clusters of this user.",
        lambda _: commands.list_clusters(),
    )
    mcp = add(
        "mcp",
        "Lets assistants that run as you read the clusters of this notebook: they start `ddp-lab mcp`.",
        lambda options: commands.mcp(options.allow_run, options.stop),
    )
    mcp.add_argument("--allow-run", action="store_true", help="they may also run cells, which are shown here")
    mcp.add_argument("--stop", action="store_true", help="stop it")
    debug = add(
        "debug",
        "Points JupyterLab's visual debugger at a rank: breakpoints in %%distributed cells, variables, steps.",
        lambda options: commands.on_current("debug", commands.debug, options.rank),
    )
    debug.add_argument(
        "rank", nargs="?", type=_rank_or_off, metavar="RANK", help="the rank, or `off` for the notebook's own cells"
    )
    for name, (text, verb, do) in _ON_CURRENT.items():
        add(name, text, functools.partial(lambda verb, do, _: commands.on_current(verb, do), verb, do))
    parser.set_defaults(call=lambda _: commands.on_current("show", commands.status))
    return parser


# command -> what it does, the verb for "nothing to ..." without a cluster, and its function
_ON_CURRENT = {
    "status": ("Shows every rank: state, device, process.", "show", commands.status),
    "stop": ("Ends all ranks and their processes.", "stop", commands.stop),
    "restart": ("Restarts every rank's process; variables are lost.", "restart", commands.restart),
    "interrupt": ("Raises KeyboardInterrupt in the running cells.", "interrupt", commands.interrupt),
    "detach": ("Leaves a detached cluster; its ranks and their cells keep running.", "detach from", commands.detach),
    "results": (
        "Lists the cells named with `%%distributed --name NAME` and their results.",
        "list",
        commands.results,
    ),
    "doctor": (
        "Diagnoses a hang: what each rank is doing, which rank it waits for, and how to fix it.",
        "diagnose",
        commands.doctor,
    ),
}


def _add_starts_options(start: argparse.ArgumentParser) -> None:
    start.add_argument("-n", type=_count, metavar="N", help="number of ranks (default: one per GPU, else 2)")
    start.add_argument("--devices", type=_devices, metavar="0,2", help="indices of the GPUs to use (default: all)")
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
        help="backend of the process group (default: auto)",
    )
    start.add_argument(
        "--hosts",
        metavar="a:4,b:4",
        help="hosts and their numbers of ranks; localhost is this machine, allocation the hosts that a batch system "
        "has allocated to this job (default: only this machine; with --launcher of a batch system, the allocation)",
    )
    start.add_argument(
        "--launcher", choices=LAUNCHERS, default="ssh", help="how ranks on other hosts are started (default: ssh)"
    )
    start.add_argument("--python", metavar="PATH", help="path of Python on other hosts (default: the same as here)")
    start.add_argument(
        "--client-address", metavar="IP", help="address of this machine for the hosts (default: detected)"
    )
    start.add_argument("--detach", action="store_true", help="the ranks outlive this notebook, until %%cluster stop")
    start.add_argument("--name", metavar="NAME", help="name of the cluster, also for `%%cluster attach NAME`")
    start.add_argument(
        "--idle-timeout",
        type=_seconds,
        metavar="S",
        help="seconds that a detached cluster lives while no notebook is attached (default: 3600)",
    )
    former_options(start)


def _distributed_parser() -> _Parser:
    parser = _Parser("%%distributed", "Runs the cell on the ranks; starts a cluster with defaults if none is running.")
    parser.add_argument("--cluster", metavar="NAME", help="cluster to run on (default: the current one)")
    _add_ranks(parser)
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="interrupt the ranks after S seconds")
    parser.add_argument("--dashboard", action="store_true", help="show the dashboard above the output")
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="return at once; the cell runs in the background, and its end is shown here",
    )
    parser.add_argument("--name", default="", metavar="NAME", help="the cell's name in tracebacks and in `lab.results`")
    parser.add_argument("--quiet", action="store_true", help="show no outputs, only errors")
    former_options(parser)
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
            "Gets variables from the ranks, assigns them here and returns them: a dict by rank, or the value itself if "
            "--ranks gives a single rank. Tensors arrive as tensors if this notebook has imported torch, else as "
            "numpy arrays; models and optimizers as their state_dict().",
            "variable of the ranks, or an expression without spaces",
        ),
        _pull,
    ),
}
"""Name -> kind, parser of its line, and function."""
