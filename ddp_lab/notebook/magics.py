"""The magics `%cluster`, `%%distributed`, `%push` and `%pull`: they parse a line and make one call."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from IPython.core.error import UsageError

from ..cluster.cells.failures import marked
from ..cluster.processes import zygote
from ..errors import CellError, DdpLabError
from ..output import quick_nbformat
from ..output.by_rank import VIEWS
from ..protocol.messages import CellText
from . import brief_errors, commands, completion, debugger
from .options import (
    Parser,
    add_export_options,
    add_import_options,
    add_ranks,
    add_start_options,
    distributed_parser,
    rank_or_off,
)
from .scripts import cells

__all__ = ["load", "unload"]

_PARTS = (brief_errors, completion, debugger, cells)
_Handler = Callable[[Any, argparse.Namespace, str], Any]


def load(shell: Any) -> None:
    """Registers the magics with an IPython shell."""
    for name, (kind, parser, run) in _MAGICS.items():
        shell.register_magic_function(_magic(shell, parser, run), kind, name)
    quick_nbformat.install()  # cells draw figures
    for part in _PARTS:
        part.load(shell)


def unload(shell: Any) -> None:
    """Stops the current cluster and removes the magics."""
    commands.stop_quietly()
    zygote.end()
    for part in _PARTS:
        part.unload(shell)
    for name, (kind, _, _) in _MAGICS.items():
        shell.magics_manager.magics[kind].pop(name, None)


def _magic(shell: Any, parser: Parser, run: _Handler) -> Callable[..., Any]:
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


def _export(options: argparse.Namespace) -> None:
    if options.notebook is not None and options.every_run:
        raise UsageError("%cluster export: --every-run is for cells that have run here, not for a --notebook file")
    commands.export(options.script, options.notebook, every_run=options.every_run, force=options.force)


def _import(options: argparse.Namespace) -> None:
    commands.import_script(options.script, options.output, n=options.n, force=options.force)


def _distributed(shell: Any, options: argparse.Namespace, cell: str) -> None:
    number = len(shell.history_manager.input_hist_raw) - 1  # execution_count increases before the cell runs
    name = options.name or "%%distributed"
    label = f"{name} [{number}]" if number > 0 else name
    text = _text_of(shell, cell, options.name)
    brief_errors.check_syntax(shell, text, label)
    commands.run_cell(
        text,
        cluster_name=options.cluster,
        ranks=options.ranks,
        label=label,
        timeout=options.timeout,
        dashboard=options.dashboard,
        wait=not options.no_wait,
        quiet=options.quiet,
        view=options.view,
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


def _cluster_parser() -> Parser:
    parser = Parser("%cluster", "Starts, shows and stops the cluster that %%distributed cells run on.")
    parsers = parser.add_subparsers(dest="command", metavar="command")

    def add(name: str, text: str, call: Any) -> argparse.ArgumentParser:
        made = parsers.add_parser(name, description=text, help=text.replace("%", "%%"))
        made.set_defaults(call=call)
        return made

    add_start_options(add("start", "Starts ranks and returns when all have finished a first collective.", _start))
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
    add_ranks(rejoin, "--replace", "terminate and restart the processes of these ranks, whatever they do")
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
    view = add(
        "view",
        "Sets the view of the next cells' output, as the switch above an output does.",
        lambda options: commands.view(options.view),
    )
    view.add_argument("view", nargs="?", choices=VIEWS, help="the view (default: show the current one)")
    debug = add(
        "debug",
        "Points JupyterLab's visual debugger at a rank: breakpoints in %%distributed cells, variables, steps.",
        lambda options: commands.on_current("debug", commands.debug, options.rank),
    )
    debug.add_argument("rank", nargs="?", type=rank_or_off, metavar="RANK", help="or `off`: the notebook's own cells")
    add_export_options(add("export", "Writes the cells that have run on the ranks as a script for torchrun.", _export))
    add_import_options(add("import", "Writes the cells of a training script as a notebook.", _import))
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


def _names_parser(prog: str, description: str, names: str) -> Parser:
    parser = Parser(prog, description)
    parser.add_argument("names", nargs="+", metavar="NAME", help=names)
    add_ranks(parser)
    return parser


_MAGICS = {
    "cluster": ("line", _cluster_parser(), _cluster),
    "distributed": ("cell", distributed_parser(), _distributed),
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
