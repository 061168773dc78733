"""The magics `%cluster`, `%%distributed`, `%push` and `%pull`: they parse a line and make one call."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from IPython.core.error import UsageError

from ..cluster.cells.failures import marked
from ..cluster.processes.host_commands import ENGINES
from ..control.records import CellText
from ..errors import ClusterError
from ..formatting import parse_ranks
from . import brief_errors, commands, completion, inspection, syntax

__all__ = ["load", "unload"]

_MAGICS = {"cluster": "line", "distributed": "cell", "push": "line", "pull": "line"}


def load(shell: Any) -> None:
    """Registers the magics with an IPython shell."""
    functions = {
        "cluster": lambda line: _cluster(line),
        "distributed": lambda line, cell: _distributed(shell, line, cell),
        "push": lambda line: _push(shell, line),
        "pull": lambda line: _pull(shell, line),
    }
    for name, kind in _MAGICS.items():
        functions[name].__doc__ = _PARSERS[name].format_help()
        shell.register_magic_function(functions[name], kind, name)
    brief_errors.load(shell)
    completion.load(shell)
    inspection.load(shell)


def unload(shell: Any) -> None:
    """Stops the current cluster and takes the magics away."""
    commands.stop_quietly()
    brief_errors.unload(shell)
    completion.unload(shell)
    inspection.unload(shell)
    for name, kind in _MAGICS.items():
        shell.magics_manager.magics[kind].pop(name, None)


def _cluster(line: str) -> None:
    options = _PARSERS["cluster"].parse_line(line)
    if options is None:
        return
    with _brief_errors():
        if options.command == "start":
            commands.start(
                n=options.n,
                devices=options.devices,
                env=dict(options.env),
                backend=options.backend,
                hosts=options.hosts,
                name=options.name,
                detached=_detached(options),
                engines=options.engines,
                python=options.python,
                address=options.address,
            )
        elif options.command == "attach":
            commands.attach(options.name, options.take_over)
        elif options.command == "list":
            commands.list_clusters()
        elif options.command == "use":
            commands.use(options.name)
        elif options.command == "rejoin":
            commands.rejoin(options.replace or ())
        else:
            getattr(commands, options.command)()


def _detached(options: argparse.Namespace) -> dict[str, Any] | None:
    """What `%cluster start` says of a cluster that is to outlive the notebook; None for one that is not."""
    if options.lease is not None and not options.detach:
        raise UsageError("%cluster start: --lease is for --detach")
    given = {} if options.lease is None else {"lease_seconds": options.lease}
    return given if options.detach else None


def _distributed(shell: Any, line: str, cell: str) -> Any:
    options = _PARSERS["distributed"].parse_line(line)
    if options is None:
        return None
    number = len(shell.history_manager.input_hist_raw) - 1  # execution_count counts on before the cell runs
    name = options.name or "%%distributed"
    label = f"{name} [{number}]" if number > 0 else name
    text = CellText(cell, first_line=2, name=options.name)
    syntax.check(shell, text, label)
    with _brief_errors():
        return commands.run_cell(
            text,
            cluster_name=options.cluster,
            ranks=options.ranks,
            label=label,
            timeout=options.timeout,
            watch=options.watch,
            wait=not options.no_wait,
            quiet=options.quiet,
        )


def _push(shell: Any, line: str) -> None:
    options = _PARSERS["push"].parse_line(line)
    if options is None:
        return
    missing = [name for name in options.names if name not in shell.user_ns]
    if missing:
        raise UsageError(f"%push: no variable {', '.join(missing)} in this notebook")
    with _brief_errors():
        commands.push({name: shell.user_ns[name] for name in options.names}, options.ranks)


def _pull(shell: Any, line: str) -> Any:
    options = _PARSERS["pull"].parse_line(line)
    if options is None:
        return None
    with _brief_errors():
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
            self._refuse(unknown[0])
        return options, unknown

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise UsageError(f"{self.prog}: {message}\nusage: {usage}")

    def _refuse(self, word: str) -> NoReturn:
        valid = [option for action in self._actions for option in action.option_strings]
        close = difflib.get_close_matches(word.split("=")[0], valid, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        self.error(f"unknown {'option' if word.startswith('-') else 'argument'} {word}{hint}")


def _checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter whose ValueError's text reaches the user."""

    def checked(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of ranks (1, 2, ...)")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is not a time in seconds (for example 30 or 0.5)")
    return seconds


def _devices(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} does not name devices (for example 0,2)") from None


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


def _add_ranks(
    parser: argparse.ArgumentParser, option: str = "--ranks", text: str = "these ranks only (default: all)"
) -> None:
    parser.add_argument(option, type=_checked(parse_ranks), metavar="0,2-3", help=text)


def _cluster_parser() -> _Parser:
    parser = _Parser("%cluster", "Starts, shows and ends the cluster that %%distributed cells run on.")
    commands_ = parser.add_subparsers(dest="command", metavar="command")
    parser.set_defaults(command="status")
    start = commands_.add_parser("start", description=_START, help=_START)
    start.add_argument("-n", type=_checked(_count), metavar="N", help="number of ranks (default: one per GPU, else 2)")
    start.add_argument("--devices", type=_checked(_devices), metavar="0,2", help="which GPUs (default: all)")
    start.add_argument(
        "--env",
        type=_checked(_assignment),
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
        type=_checked(_seconds),
        metavar="S",
        help="seconds that a detached cluster lives while no notebook is attached (default: 3600)",
    )
    use = commands_.add_parser("use", description=_USE, help=_USE.replace("%", "%%"))
    use.add_argument("name", metavar="NAME", help="as `%%cluster list` shows it")
    attach = commands_.add_parser("attach", description=_ATTACH, help=_ATTACH)
    attach.add_argument("name", nargs="?", metavar="NAME", help="which (default: the only one)")
    attach.add_argument("--take-over", action="store_true", help="send a notebook away that is attached")
    for name, text in _CLUSTER_COMMANDS.items():
        command = commands_.add_parser(name, description=text, help=text.replace("%", "%%"))
        if name == "rejoin":
            _add_ranks(command, "--replace", "end the processes of these ranks first, whatever they do")
    return parser


_START = "Starts ranks and returns when all have finished a collective."
_USE = "Makes a running cluster of this notebook the current one: %%distributed cells run on it."
_ATTACH = "Finds a detached cluster again: variables are kept, cells have run on."
_CLUSTER_COMMANDS = {
    "status": "Shows every rank: state, device, process.",
    "stop": "Ends all ranks and their processes.",
    "restart": "Replaces every rank's process by a new one; variables are gone.",
    "rejoin": "Gives the ranks new process groups, and those that have ended new processes; variables are kept.",
    "interrupt": "Raises KeyboardInterrupt in the cells that run.",
    "detach": "Lets go of a detached cluster; its ranks and their cells go on.",
    "list": "Lists the clusters of this notebook, the current one first, and the detached clusters of this user.",
    "results": "Lists the cells that were named with `%%distributed --name NAME`, and what came of them.",
    "doctor": "Says why the ranks do not come on: what each of them does, who waits for whom, what helps.",
}


def _distributed_parser() -> _Parser:
    parser = _Parser("%%distributed", "Runs the cell on the ranks; starts a cluster with defaults if none runs.")
    parser.add_argument("--cluster", metavar="NAME", help="on this cluster of the notebook (default: the current one)")
    _add_ranks(parser)
    parser.add_argument("--timeout", type=_checked(_seconds), metavar="S", help="interrupt the ranks after S seconds")
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


_PARSERS: dict[str, _Parser] = {
    "cluster": _cluster_parser(),
    "distributed": _distributed_parser(),
    "push": _names_parser("%push", "Sets variables of this notebook on the ranks.", "variable of this notebook"),
    "pull": _names_parser(
        "%pull",
        "Gets variables from the ranks, binds them here and returns them: a dict by rank, or the value itself when "
        "--ranks names a single rank. Tensors come as tensors if this notebook has imported torch, else as numpy "
        "arrays; models and optimizers as their state_dict().",
        "variable of the ranks, or an expression without spaces",
    ),
}
