"""The `ddp-lab` command: run the demo, open the lab, record any script, report, measure."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import os
import re
import select
import shutil
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import documentation, lesson_files, teaching
from .._version import __version__
from ..command_line import Parser, count, file_to_write, folder_to_write, percent, seconds, tell, write_json
from ..diagnosis.command import EXIT_CODES, doctor
from ..errors import DdpLabError
from ..files import write_text
from ..printable import printable_lines

__all__ = ["main", "run_notebook"]

_NETWORK_SCRIPT = re.compile(r"<script[^>]*\ssrc=['\"]https?://[^>]*>\s*</script>")
# The exporter's own style breaks lines within words.
_WHOLE_WORDS = "<style>.jp-RenderedText pre { word-break: normal !important; overflow-wrap: anywhere }</style>"
_INTERRUPTED = 130  # exit code after Ctrl-C
_SLOWER = 3  # exit code of `compare`
_USAGE = 2  # exit code of an invalid command line
_EXPECTED = "expected a folder from `ddp-lab run` or a file from `lab.timeline.save(path)`"
_WITH_CHECK = ("cell_timeout", "timeout", "json", "csv")  # options of `lessons`
_COLOUR = re.compile(r"\x1b\[[\d;]*m")

# benchmark -> what it compares; each is a module of ddp_lab.bench with a `main(argv) -> int`
BENCHMARKS = {
    "all-reduce": "an all-reduce, or another collective, through shared memory and Gloo, with the limits of the memory",
    "start": "%cluster start to the first collective, against plain ipyparallel",
    "step": "training step and its exposed communication: our DistributedDataParallel against torch's",
}


def demo(arguments: argparse.Namespace) -> int:
    """Runs the quickstart notebook on a cluster; writes the executed notebook and one HTML page."""
    from ..output import quick_nbformat

    quick_nbformat.install()
    import nbformat

    source = lesson_files.home() / lesson_files.QUICKSTART
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.read(source, as_version=4)
    print(f"running {source.name} on a cluster ...", flush=True)
    # Figures embed plotly.js, so that the page needs no network.
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype+notebook"
    began = time.monotonic()
    try:
        run_notebook(notebook, source.parent)
    finally:
        write_text(folder / "quickstart.ipynb", nbformat.writes(notebook) + "\n")
    page = folder / "quickstart.html"
    write_text(page, _to_html(notebook))
    for line in _printed(notebook, tag="summary"):
        print(line)
    print(f"done in {time.monotonic() - began:.1f} s; wrote {folder / 'quickstart.ipynb'} and {page}")
    return 0


def run_notebook(notebook: Any, folder: Path) -> None:
    """Runs all cells in a new kernel, and keeps their outputs in the notebook.

    Args:
        notebook: of nbformat.
        folder: the kernel's working directory.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed without a tag that allows it.
    """
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as private:
        # Sockets are files that only this user can open, not TCP ports.
        kernel = AsyncKernelManager(transport="ipc", connection_file=str(Path(private, "kernel.json")))
        client = NotebookClient(notebook, kernel, timeout=600, resources={"metadata": {"path": str(folder)}})
        client.owns_km = True  # it ends the kernel too
        client.execute()


def _to_html(notebook: Any) -> str:
    """Returns one page that needs no network."""
    from nbconvert import HTMLExporter

    page = copy.deepcopy(notebook)
    page["metadata"].pop("widgets", None)  # live views need a kernel; each has a picture next to it
    for output in (output for cell in page["cells"] for output in cell.get("outputs", [])):
        data = output.get("data", {})
        data.pop("application/vnd.jupyter.widget-view+json", None)
        if "text/html" in data:
            data["text/html"] = _NETWORK_SCRIPT.sub("", data["text/html"])
    exporter = HTMLExporter(template_name="lab", embed_images=True)
    for trait in ("mathjax_url", "require_js_url", "jquery_url", "mermaid_js_url", "widget_renderer_url"):
        if exporter.has_trait(trait):
            setattr(exporter, trait, "")
    body, _ = exporter.from_notebook_node(page)
    return _NETWORK_SCRIPT.sub("", str(body)).replace("</head>", f"{_WHOLE_WORDS}</head>", 1)


def _printed(notebook: Any, tag: str) -> list[str]:
    """Returns the lines that the cells with this tag printed, without colours."""
    texts = (
        str(output.get("text") or output.get("data", {}).get("text/plain", ""))
        for cell in notebook["cells"]
        if tag in cell.get("metadata", {}).get("tags", [])
        for output in cell.get("outputs", [])
        if "text/html" not in output.get("data", {})
    )
    return [_COLOUR.sub("", line) for text in texts for line in text.splitlines()]


def lab(arguments: argparse.Namespace) -> int:
    """Opens JupyterLab on the lessons or on the given place, with a zygote for all its kernels; never returns."""
    if shutil.which("jupyter-lab", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") is None:
        raise DdpLabError("JupyterLab is not installed: run `pip install 'ddp_lab[notebooks]'`")
    command = _jupyterlab(arguments.options)
    from ..cluster.processes import zygote
    from ..cluster.processes.launchers import make_run_dir

    environment = lesson_files.lab_environment()
    if zygote.wanted():
        environment[zygote.OFFERED] = str(folder := make_run_dir())
        zygote.offer(folder, environment)
    os.execve(command[0], command, environment)


def _jupyterlab(given: Sequence[str]) -> list[str]:
    """The command that opens the place that the options give, else the lessons."""
    if lesson_files.names_a_folder(given):
        return lesson_files.lab_command(None, given)
    place, options = _place(given)
    if place is None:
        folder = lesson_files.working_copy(Path.cwd())
        print(f"notebooks and lessons are in {folder}", flush=True)
        return lesson_files.lab_command(folder, options, lesson_files.QUICKSTART)
    if place.is_dir():
        return lesson_files.lab_command(place, options)
    return lesson_files.lab_command(place.parent, options, Path(place.name))


def _place(options: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The place to open, given before or after JupyterLab's options, and these options; their values are not places."""
    if options and not options[0].startswith("-"):
        if not Path(options[0]).exists():
            raise DdpLabError(f"there is no folder or notebook {options[0]!r}")
        return Path(options[0]).resolve(), list(options[1:])
    if options and not options[-1].startswith("-") and Path(options[-1]).exists():
        return Path(options[-1]).resolve(), list(options[:-1])
    return None, list(options)


def lessons(arguments: argparse.Namespace, parser: Parser) -> int:
    """Lists the lessons, copies them for a class, or judges what students hand in."""
    given = [name for name in _WITH_CHECK if getattr(arguments, name) is not None]
    if arguments.check:
        return _judge(arguments)
    if given:
        parser.error(f"--{given[0].replace('_', '-')} needs --check DIR")
    if arguments.student or arguments.solutions:
        folder = arguments.student or arguments.solutions
        copied = teaching.copy_lessons(folder, solutions=arguments.student is None)
        print(f"{len(copied)} lessons {'without' if arguments.student else 'with'} solutions are in {folder}")
        return 0
    print(_table_of_lessons())
    return 0


def _table_of_lessons() -> str:
    """A line for each lesson."""
    rows = [["lesson", "minutes", "read first", "title"]]
    for one in teaching.lessons():
        rows.append([one.number, str(one.minutes or ""), ", ".join(one.before), one.title])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _judge(arguments: argparse.Namespace) -> int:
    """Judges the notebooks of a class; Ctrl-C ends that, and the results so far are kept."""
    usual, judged, code = teaching.Limits(), [], 0
    limits = teaching.Limits(arguments.cell_timeout or usual.cell, arguments.timeout or usual.notebook)
    try:
        for one in teaching.judge(arguments.check, limits):
            judged.append(one)
            print(_marks(one), flush=True)
    except KeyboardInterrupt:
        print("interrupted: the following notebooks have not run")
        code = _INTERRUPTED
    print(f"\n{teaching.as_text(judged)}")
    if arguments.json:
        write_json(arguments.json, teaching.as_json(judged))
    if arguments.csv:
        try:
            arguments.csv.parent.mkdir(parents=True, exist_ok=True)
            write_text(arguments.csv, teaching.as_csv(judged))
        except OSError as error:
            raise DdpLabError(f"can't write {arguments.csv}: {error.strerror}") from error
    return code


def _marks(one: teaching.Judged) -> str:
    """What came of a notebook, in short."""
    passed = sum(mark.state == teaching.PASSED for mark in one.marks)
    what = f"{passed} of {len(one.marks)} exercises passed in {one.seconds:.0f} s" if one.marks else one.problem
    return f"{one.notebook}: {what}"


def _known_folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path


def _main_of(module: str, arguments: argparse.Namespace) -> int:
    """Passes the options to a command of another package; returns its exit code."""
    code: int = importlib.import_module(f"ddp_lab.{module}").main(arguments.options)
    return code


def run(arguments: argparse.Namespace) -> int:
    """Runs a training script under torch's elastic agent, records it and reports; returns the script's exit code."""
    return _main_of("launch.agent", arguments)


def tune(arguments: argparse.Namespace) -> int:
    """Runs a training script and searches for faster bucket size limits; returns the script's exit code."""
    return _main_of("launch.tune", arguments)


def bench(arguments: argparse.Namespace) -> int:
    """Runs one benchmark and prints its table."""
    return _main_of(f"bench.{arguments.name.replace('-', '_')}", arguments)


@contextlib.contextmanager
def _read() -> Iterator[None]:
    """Reports unreadable files in one line."""
    try:
        yield
    except FileNotFoundError as error:
        path = error.filename or str(error).removesuffix(" does not exist")
        raise DdpLabError(f"no such run: {path} ({_EXPECTED})") from error
    except (ValueError, OSError) as error:
        raise DdpLabError(str(error)) from error


def report(arguments: argparse.Namespace) -> int:
    """Merges recordings of ranks, prints a summary and writes one HTML page; 1 if there is nothing to show."""
    from ..launch import reports

    source = Path(arguments.files[0])
    beside = source / "report.html" if source.is_dir() else source.with_suffix(".html")
    with _read():
        run = reports.read(arguments.files, partial=arguments.partial)
    for line in run.hangs:
        print(printable_lines(f"hang: {line}"))
    page = Path(arguments.output or beside)
    try:
        reports.write_pages(run, page)
    except OSError as error:
        raise DdpLabError(f"can't write {error.filename or page}: {error.strerror}") from error
    return 0 if run.timeline.reducers() or run.timeline.groups() else 1


def compare(arguments: argparse.Namespace) -> int:
    """Compares two recorded runs; exit code 3 if the second one's step is clearly slower by the threshold."""
    from ..timeline.comparison import compare as compare_runs

    with _read():
        compared = compare_runs(*arguments.files)
    print(compared)
    if arguments.json:
        write_json(arguments.json, compared.as_dict(arguments.threshold))
    return _SLOWER if compared.is_slower(arguments.threshold) else 0


def check_install(arguments: argparse.Namespace) -> int:
    """Checks each required part; exit code 1 if one fails."""
    return importlib.import_module(".check_install", __package__).show(arguments.json)  # type: ignore[no-any-return]


def docs(arguments: argparse.Namespace) -> int:
    path, heading = documentation.page(arguments.page)
    if arguments.only_print:
        print(path)
        return 0
    address = documentation.address(path, heading)
    print(address, flush=True)
    if not webbrowser.open(address):
        print("ddp-lab: no browser can be opened here: open this address in yours", file=sys.stderr)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Writes a notebook's script, and prints what was written and what was left out."""
    from ..notebook.scripts import export_notebook

    print("\n".join(export_notebook(arguments.notebook, arguments.script, force=arguments.force)))
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Writes a script's notebook, and prints what was written."""
    from ..notebook.scripts import import_script

    lines = import_script(arguments.script, arguments.output, n=arguments.n, force=arguments.force)
    print("\n".join(lines))
    return 0


def mcp(arguments: argparse.Namespace, parser: Parser) -> int:
    """Serves until the assistant closes the input."""
    from ..assistants import stdio

    if arguments.recording is not None and (arguments.process is not None or arguments.allow_run):
        parser.error("--recording serves files: --process and --allow-run are for a notebook")
    if sys.stdin.isatty():
        tell("waits for an assistant on standard input; Ctrl-D ends it (`ddp-lab docs how_to/assistants` explains it)")
    try:
        if arguments.recording is not None:
            stdio.serve_recording(arguments.recording)
        else:
            stdio.serve_notebook(arguments.process, arguments.allow_run)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except FileNotFoundError as error:
        raise DdpLabError(f"{error.filename or arguments.recording} does not exist") from error
    except (ValueError, OSError) as error:
        raise DdpLabError(str(error)) from error
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="ddp-lab",
        description="See and fix what data-parallel training does.",
        examples=("ddp-lab run --standalone --nproc-per-node 2 train.py", "ddp-lab lab"),
    )
    parser.add_argument("--version", action="version", version=f"ddp_lab {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for add in (
        _add_demo,
        _add_lab,
        _add_lessons,
        _add_export_and_import,
        _add_run_and_tune,
        _add_doctor,
        _add_report,
        _add_compare,
        _add_mcp,
        _add_check_install,
        _add_bench,
        _add_docs,
    ):
        add(commands)
    return parser


def _add_demo(commands: Any) -> None:
    made = commands.add_parser(
        "demo",
        help="run the quickstart notebook on a cluster and write it as an HTML page",
        description="Runs the quickstart notebook on a cluster; writes it with its outputs, and as an HTML page.",
        examples=("ddp-lab demo", "ddp-lab demo --output /tmp/demo"),
    )
    made.add_argument(
        "--output",
        type=folder_to_write,
        default=Path("build/demo"),
        metavar="FOLDER",
        help="folder for the notebook and the page (%(default)s)",
    )
    made.set_defaults(call=demo)


def _add_lab(commands: Any) -> None:
    made = commands.add_parser(
        "lab",
        help="open JupyterLab on the notebooks and lessons",
        usage="ddp-lab lab [-h] [PLACE] [JUPYTERLAB'S OPTIONS]",
        description="Opens JupyterLab on the lessons, or on a folder or notebook of your own. JupyterLab's options are "
        "passed on; `ddp-lab lab --help-all` lists them.",
        examples=("ddp-lab lab", "ddp-lab lab my_notebooks --no-browser --port=8889"),
    )
    made.add_argument("place", nargs="?", metavar="PLACE", help="a folder or a notebook (the lessons)")
    made.set_defaults(call=lab)


def _add_lessons(commands: Any) -> None:
    limits = teaching.Limits()
    made = commands.add_parser(
        "lessons",
        help="list the lessons, copy them for a class, or check what students hand in",
        description="Without options: lists the lessons. Exit code 1: the folder to check holds no notebook, or an "
        "edited notebook would be overwritten.",
        examples=(
            "ddp-lab lessons",
            "ddp-lab lessons --student class",
            "ddp-lab lessons --check handed_in --csv all.csv",
        ),
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument(
        "--student", type=folder_to_write, metavar="DIR", help="copy the lessons here, without the solutions"
    )
    what.add_argument(
        "--solutions", type=folder_to_write, metavar="DIR", help="copy the lessons here, with the solutions"
    )
    what.add_argument(
        "--check",
        type=_known_folder,
        metavar="DIR",
        help="run the notebooks here and print a table of the solved exercises; DIR holds a folder or a notebook for "
        "each student",
    )
    made.add_argument(
        "--cell-timeout", type=seconds, metavar="S", help=f"interrupt a cell after S seconds (default: {limits.cell:g})"
    )
    made.add_argument(
        "--timeout", type=seconds, metavar="S", help=f"end a notebook after S seconds (default: {limits.notebook:g})"
    )
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write the results of --check here")
    made.add_argument("--csv", type=file_to_write, metavar="FILE", help="write them as a table for spreadsheets")
    made.set_defaults(call=lambda arguments: lessons(arguments, made))


def _add_export_and_import(commands: Any) -> None:
    made = commands.add_parser(
        "export",
        help="write a notebook's cells as a script for torchrun",
        description="Writes the %%distributed cells of a notebook as a script for torchrun. Plain cells are left out, "
        "unless their first line is `# export`. Exit code 1: nothing was written, and why.",
        examples=("ddp-lab export train.ipynb train.py", "ddp-lab export train.ipynb train.py --force"),
    )
    made.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="the notebook to read")
    made.add_argument("script", type=file_to_write, metavar="SCRIPT", help="the script to write")
    made.add_argument("--force", action="store_true", help="replace an existing file")
    made.set_defaults(call=export)
    made = commands.add_parser(
        "import",
        help="write a training script's cells as a notebook",
        description="Writes a notebook that starts a cluster and runs a training script in %%distributed cells. Exit "
        "code 1: nothing was written, and why.",
        examples=("ddp-lab import train.py", "ddp-lab import train.py --output cells.ipynb -n 4"),
    )
    made.add_argument("script", type=Path, metavar="SCRIPT", help="the script to read")
    made.add_argument(
        "--output", type=file_to_write, metavar="FILE", help="the notebook to write (default: SCRIPT with .ipynb)"
    )
    made.add_argument(
        "-n",
        type=count,
        metavar="N",
        help="number of ranks (default: as the script's text says, else one per GPU, else 2)",
    )
    made.add_argument("--force", action="store_true", help="replace an existing file")
    made.set_defaults(call=import_)


def _add_run_and_tune(commands: Any) -> None:
    made = commands.add_parser("run", help="run a training script as torchrun does, record it and report")
    made.set_defaults(call=run)
    made = commands.add_parser("tune", help="run a training script as torchrun does and tune its bucket size limits")
    made.set_defaults(call=tune)


def _add_doctor(commands: Any) -> None:
    made = commands.add_parser(
        "doctor",
        help="say why a training that was started without ddp_lab hangs",
        description="Says which rank waits where and for whom, in a job that was started without ddp_lab: from dumps "
        f"of torch's Flight Recorder, from torch's debug server, or from its processes on this host. {EXIT_CODES}",
        examples=(
            "ddp-lab doctor /tmp/dumps          # files of TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
            "ddp-lab doctor node7:25999         # torch's debug server, or ddp_lab.serve_doctor()",
            "ddp-lab doctor $(pgrep torchrun)   # its ranks, read by py-spy",
        ),
    )
    made.add_argument(
        "of",
        nargs="+",
        metavar="JOB",
        help="a folder or files with dumps, HOST:PORT of a debug server, or ids of processes: ranks, or their launcher",
    )
    made.add_argument(
        "--seconds",
        type=seconds,
        default=3.0,
        metavar="S",
        help="how long to observe a running job; ranks that move meanwhile are not stuck (default: %(default)g)",
    )
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    made.set_defaults(call=doctor)


def _add_report(commands: Any) -> None:
    made = commands.add_parser(
        "report",
        help="summarise a recorded run and write an HTML report",
        description="Merges the files of all ranks of one run, prints a summary and writes an HTML page. Exit code 1: "
        "there is nothing to show.",
        examples=("ddp-lab report run-a", "ddp-lab report rank*.npz --output page.html"),
    )
    made.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a folder of `ddp-lab run`, journals of its ranks, or files of `lab.timeline.save(path)` and "
        "`ddp_lab.recording.save(path)`",
    )
    made.add_argument(
        "--output", type=file_to_write, metavar="PAGE", help="the HTML page to write (default: next to the first FILE)"
    )
    made.add_argument("--partial", action="store_true", help="report even if files of some ranks are missing")
    made.set_defaults(call=report)


def _add_compare(commands: Any) -> None:
    made = commands.add_parser(
        "compare",
        help="compare two recorded runs",
        description="Compares two runs per phase, rank and bucket, with 99 % intervals over the steps. Exit code 0: "
        "B's step is not clearly slower than A's by the threshold; 3: it is; 1: the runs can't be compared.",
        examples=("ddp-lab compare run-a run-b", "ddp-lab compare run-a run-b --threshold 5% --json differences.json"),
    )
    made.add_argument("files", nargs=2, metavar="RUN", help="A and B: files of `timeline.save(path)`, or run folders")
    made.add_argument(
        "--threshold", type=percent, default=5.0, metavar="PERCENT", help="share of the step, e.g. 5%% (%(default)s %%)"
    )
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write all differences here")
    made.set_defaults(call=compare)


def _add_mcp(commands: Any) -> None:
    made = commands.add_parser(
        "mcp",
        help="let an assistant read a notebook's cluster or a recorded run",
        description="Serves tools over the Model Context Protocol, on standard input and output: an assistant starts "
        "this command. It finds the notebook in which you ran `%cluster mcp`. Reading is all that it allows, unless "
        "both this command and the notebook got --allow-run. Exit code 1: the recording can't be read, or the `mcp` "
        "library is missing.",
        examples=("ddp-lab mcp", "ddp-lab mcp --recording run-a", "ssh gpu-server ddp-lab mcp"),
    )
    made.add_argument(
        "--recording",
        type=Path,
        metavar="PATH",
        help="serve a recorded run instead: a folder of `ddp-lab run` or a file of `lab.timeline.save(path)`",
    )
    made.add_argument(
        "--process", type=count, metavar="PID", help="process id of the notebook's kernel, if several serve assistants"
    )
    made.add_argument(
        "--allow-run", action="store_true", help="offer the tool that runs a cell, if the notebook allows it"
    )
    made.set_defaults(call=lambda arguments: mcp(arguments, made))


def _add_check_install(commands: Any) -> None:
    made = commands.add_parser(
        "check-install",
        help="check the installation",
        description="Checks Python, torch, the extension, JupyterLab, /dev/shm, loopback and limits, and averages a "
        "gradient on a real cluster. Exit code 0: everything works; 1: a check failed, and its line says what to do.",
        examples=("ddp-lab check-install", "ddp-lab check-install --json"),
    )
    made.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=file_to_write,
        metavar="FILE",
        help="write the result as JSON to FILE; without FILE, only to stdout",
    )
    made.set_defaults(call=check_install)


def _add_bench(commands: Any) -> None:
    made = commands.add_parser(
        "bench",
        help="run benchmarks (ddp_lab against torch and others)",
        usage="ddp-lab bench [-h] NAME [OPTIONS]",
        description="Measures ddp_lab next to what it is compared with. `ddp-lab bench NAME --help` lists a\n"
        "benchmark's own options, `--json FILE` among them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(f"  {name:12} {what}" for name, what in BENCHMARKS.items()),
        examples=("ddp-lab bench step --models mlp", "ddp-lab bench all-reduce --json all_reduce.json"),
    )
    made.add_argument("name", choices=sorted(BENCHMARKS), metavar="NAME", help="name of the benchmark")
    made.set_defaults(call=bench)


def _add_docs(commands: Any) -> None:
    made = commands.add_parser(
        "docs",
        help="open the documentation in the browser",
        description="Opens the documentation, which needs no network, in the browser. A wheel of `make wheel` contains "
        "it; in a clone, `make site` builds it. Exit code 1: it is not there, or has no such page.",
        examples=("ddp-lab docs", "ddp-lab docs guide/dashboard", "ddp-lab docs troubleshooting#firewall"),
    )
    made.add_argument(
        "page",
        nargs="?",
        default="index",
        metavar="PAGE",
        help="a page, and a heading of it, as in links of the site (the first page)",
    )
    made.add_argument(
        "--print", action="store_true", dest="only_print", help="print the path of its file and open nothing"
    )
    made.set_defaults(call=docs)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    A `DdpLabError` is one line on stderr and exit code 1. So is 1, without a word, if nobody reads what the command
    prints any more, as in ``ddp-lab lessons | head -1``.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_stdout_broken():
            raise
        # Else Python, which flushes once more when it exits, would report it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _is_stdout_broken() -> bool:
    """Whether it is stdout whose reader has gone, and not another pipe or socket."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(happened & (select.POLLERR | select.POLLHUP) for _, happened in poll.poll(0))


def _run(given: list[str]) -> int:
    parser = _parser()
    if not given:
        parser.print_help()
        return _USAGE
    # `run`, `tune` and `bench NAME` pass on every further option, including --help; `lab` handles that one itself.
    keep = {"lab": 1, "run": 1, "tune": 1, "bench": 2}.get(given[0], len(given))
    if given[0] == "bench" and (len(given) < 2 or given[1].startswith("-")):
        keep = len(given)
    if given[0] == "lab" and not {"-h", "--help"}.isdisjoint(given):
        given, keep = ["lab", "--help"], 2
    arguments = parser.parse_args(given[:keep])
    arguments.options = given[keep:]
    try:
        code: int = arguments.call(arguments)
    except DdpLabError as error:
        print(f"ddp-lab: {printable_lines(str(error))}", file=sys.stderr)
        return 1
    return code
