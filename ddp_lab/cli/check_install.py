"""`ddp-lab check-install`: checks everything that a user needs. One line for each check, with a fix.

Parts that may crash or have another version (torch, the compiled extension, JupyterLab) are checked in a process of
their own. At the end a real cluster of two ranks averages a gradient.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..cluster.cluster import Cluster
from ..command_line import write_json
from ..documentation import with_help
from ..errors import DdpLabError, FallbackWarning
from ..machine import visible_gpus
from ..native import built_for
from ..protocol.parcels import LARGE

__all__ = ["CHECKS", "Check", "check_all", "show"]

OK, WARNING, FAILED = "ok", "warning", "failed"

_OLDEST_PYTHON = (3, 10)
_FEWEST_FILES, _FEW_FILES = 256, 1024
_LEAST_SHM = 65 << 20  # Docker's default is 64 MiB
_SECONDS = 120.0

_TORCH = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "backends": [b for b in ("gloo", "nccl", "mpi") if dist.is_available() and getattr(dist, f"is_{b}_available")()],
}))
"""
_EXTENSION = """
import json
from ddp_lab import _schedule, native
from ddp_lab.errors import ExtensionError
try:
    native.load()
    print(json.dumps(""))
except ExtensionError as error:
    print(json.dumps(str(error)))
"""
_JUPYTER = """
import json, jupyterlab
from jupyter_core.paths import jupyter_path
from jupyterlab_server.config import get_page_config
page = get_page_config(jupyter_path("labextensions"))  # the extensions that the server tells the browser to load
print(json.dumps({
    "version": jupyterlab.__version__,
    "seen": [one["name"] for one in page["federated_extensions"] if one["name"] not in page["disabledExtensions"]],
}))
"""
_GRADIENT = """
import ddp_lab
model = ddp_lab.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).to(device))
model(torch.full((1, 2), rank + 1.0, device=device)).sum().backward()
average = model.module.weight.grad.flatten().tolist()
"""
# tool -> its programs and purpose
_TOOLS = {
    "g++": (("g++",), "compiles the extension (Debian: apt install g++)"),
    "Chromium": (
        ("chromium", "chromium-browser", "google-chrome"),
        "runs the browser tests (Debian: apt install chromium)",
    ),
}
_WIDGETS = ("@jupyter-widgets/jupyterlab-manager", "anywidget")


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        name: of the checked part.
        state: ``"ok"``, ``"warning"`` (it works, but something is missing or scarce) or ``"failed"``.
        found: the observed facts, or the error.
        remedy: what to do, empty if nothing.
    """

    name: str
    state: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:8} {self.name:14} {self.found}"
        return "\n".join([line, *(f"{'':24}{one}" for one in self.remedy.splitlines())])


def python() -> Check:
    """The interpreter and the system."""
    found = f"Python {platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST_PYTHON:
        return Check("Python", FAILED, found, "Create an environment with Python 3.10 or later.")
    if not sys.platform.startswith("linux"):
        return Check("Python", FAILED, found, "Clusters run only on Linux (on macOS: in Docker; on Windows: in WSL 2).")
    return Check("Python", OK, found)


def packages() -> Check:
    """The packages that this one requires."""
    try:
        required = importlib.metadata.requires("ddp_lab") or []
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "packages", FAILED, "ddp_lab is not installed here", "Run `make` in its source tree, or `pip install .`."
        )
    names = [re.split(r"[^\w.-]", one)[0] for one in required if "extra ==" not in one]
    versions, missing = [], []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("packages", FAILED, f"missing: {', '.join(missing)}", f"Run `pip install {' '.join(missing)}`.")
    return Check("packages", OK, ", ".join(one for one in versions if not one.startswith("torch ")))


def torch() -> Check:
    """The version of torch, its build, and the devices that it sees."""
    asked, error = _ask(_TORCH)
    if asked is None:
        return Check("torch", FAILED, f"it does not load: {error}", "Run `pip install torch==2.13.0`.")
    built = f"CUDA {asked['cuda']}" if asked["cuda"] else "CPU"
    found = f"{asked['version']}, built for {built}; backends {', '.join(asked['backends']) or 'none'}"
    if "gloo" not in asked["backends"]:
        return Check("torch", FAILED, found, "Install a torch that was built with torch.distributed and Gloo.")
    gpus = visible_gpus(os.environ)
    if gpus and not asked["devices"]:
        remedy = (
            "Install a torch for this driver's CUDA (https://pytorch.org/get-started); until then, start CPU ranks "
            "with `%cluster start --backend gloo`."
        )
        remedy = with_help(remedy, "torch-sees-no-gpu")
        return Check("torch", WARNING, f"{found}; it sees none of {len(gpus)} GPUs", remedy)
    devices = ", ".join(asked["devices"]) or f"{len(os.sched_getaffinity(0))} CPU cores, no GPU"
    return Check("torch", OK, f"{found}; {devices}")


def extension() -> Check:
    """The compiled extension, built for the installed torch."""
    asked, error = _ask(_EXTENSION)
    if asked is None or asked:
        text, _, remedy = (asked or error).partition(": ")
        return Check("extension", FAILED, text, remedy or "Rebuild it with `make` in the source tree.")
    return Check("extension", OK, f"built for torch {', '.join(built_for())}, loads")


def jupyterlab() -> Check:
    """JupyterLab, and whether its server has the extensions that widgets need."""
    asked, error = _ask(_JUPYTER)
    remedy = "Run `pip install 'ddp_lab[notebooks]'` (not needed for scripts and `ddp-lab run`)."
    if asked is None:
        return Check("JupyterLab", WARNING, f"not installed: {error}", remedy)
    missing = [name for name in _WIDGETS if name not in asked["seen"]]
    if missing:
        remedy = with_help(
            "Live views stay blank: run `pip install --force-reinstall jupyterlab_widgets anywidget` in the server's "
            "environment, and check `jupyter labextension list`.",
            "blank-widgets",
        )
        return Check("JupyterLab", FAILED, f"{asked['version']}; its server does not see {', '.join(missing)}", remedy)
    return Check("JupyterLab", OK, f"{asked['version']}; its server sees {', '.join(_WIDGETS)}")


def tools() -> Check:
    """The tools that build and test a clone; not needed after installing a wheel."""
    found = {name: next(filter(None, map(shutil.which, programs)), "") for name, (programs, _) in _TOOLS.items()}
    told = ", ".join(f"{name} {path or 'not found'}" for name, path in found.items())
    missing = [name for name, path in found.items() if not path]
    if not missing or not Path(__file__).parents[2].joinpath("csrc").is_dir():
        return Check("tools", OK, f"{told} (to build and test a clone)")
    remedies = [f"{name} {_TOOLS[name][1]}" for name in missing]
    return Check("tools", WARNING, told, f"Needed only to build and test: {'; '.join(remedies)}.")


def shared_memory() -> Check:
    """/dev/shm, which data loaders and some backends use."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Check("/dev/shm", WARNING, "missing or not writable", "Mount a tmpfs there (docker: --shm-size=1g).")
    state = os.statvfs(folder)
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    found = f"{free / 2**20:,.0f} of {total / 2**20:,.0f} MiB free"
    if free < _LEAST_SHM:
        remedy = with_help(
            "DataLoader workers may fill it: use num_workers=0, smaller batches, or enlarge it "
            "(docker: --shm-size=1g).",
            "small-dev-shm",
        )
        return Check("/dev/shm", WARNING, found, remedy)
    return Check("/dev/shm", OK, found)


def loopback() -> Check:
    """Two processes of this host must reach each other over ports of 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                taken, _ = server.accept()
                with taken:
                    taken.settimeout(5)
                    client.sendall(b"?")
                    arrived = taken.recv(1)
    except OSError as error:
        return Check("loopback", FAILED, str(error), "Bring the interface up (`ip link set lo up`); allow 127.0.0.1.")
    if arrived != b"?":
        return Check("loopback", FAILED, "sent data did not arrive", "Check for a firewall on the interface lo.")
    return Check("loopback", OK, f"port {port} of 127.0.0.1 was opened and reached")


def open_files() -> Check:
    """How many files and sockets a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} open files per process (at most {hard:,})" if hard != resource.RLIM_INFINITY else f"{soft:,}"
    if soft < _FEW_FILES:
        state = FAILED if soft < _FEWEST_FILES else WARNING
        return Check("open files", state, found, "Raise the limit: run `ulimit -n 4096` before you start JupyterLab.")
    return Check("open files", OK, found)


def cluster() -> Check:
    """Two CPU ranks average a gradient through shared memory."""
    return _gradient("cluster", 2, "shm")


def gpu_cluster() -> Check | None:
    """One rank on each GPU averages a gradient; None if there is no GPU."""
    gpus = visible_gpus(os.environ)
    return _gradient("GPU cluster", len(gpus), "auto") if gpus else None


def _gradient(name: str, ranks: int, backend: str) -> Check:
    began = time.monotonic()
    # Output of ranks must not mix with ours.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", FallbackWarning)
        try:
            with Cluster(ranks, backend=backend) as lab:
                started = time.monotonic() - began
                lab.run(_GRADIENT, timeout=_SECONDS)
                values = lab.pull("average")
                lab.push({"array": bytes(LARGE)})
                arrived = bool(lab.timeline.reducers())
        except (DdpLabError, OSError, ImportError, TimeoutError) as error:
            first, *rest = str(error).splitlines() or [type(error).__name__]
            remedy = "Fix the failures above first; if there are none, please report a bug."
            return Check(name, FAILED, first, "\n".join([*(line.strip() for line in rest[-2:]), remedy]))
    expected = (ranks + 1) / 2
    if any(abs(one - expected) > 1e-6 for rank in range(ranks) for one in values[rank]):
        return Check(name, FAILED, f"the averages are {values}, not {expected}", "Please report this bug.")
    found = f"{ranks} rank{'s' if ranks > 1 else ''} started in {started:.1f} s and averaged a gradient"
    if not arrived:
        return Check(name, FAILED, f"{found}, but no event arrived", "Check for a firewall on the interface lo.")
    fell_back = dict.fromkeys(str(one.message) for one in warned if issubclass(one.category, FallbackWarning))
    if fell_back:
        limits, links = zip(*((one.partition("\n")[::2]) for one in fell_back), strict=True)
        remedy = "\n".join(["It works, with these limitations.", *filter(None, links)])
        return Check(name, WARNING, f"{found}; but {'; '.join(limits)}", remedy)
    return Check(name, OK, f"{found}, whose events arrived")


_HERE = (python, packages, torch, extension, jupyterlab, tools, shared_memory, loopback, open_files)
CHECKS: tuple[Callable[[], Check | None], ...] = (*_HERE, cluster, gpu_cluster)


def _ask(code: str) -> tuple[Any, str]:
    """The JSON that a fresh interpreter prints, or None and the last line of its error."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_SECONDS:.0f} s"
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        return None, told[-1] if told else f"the process exited with code {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1]), ""


def check_all(
    say: Callable[[Check], object] = print, checks: Sequence[Callable[[], Check | None]] = CHECKS
) -> list[Check]:
    """Runs all checks, one after the other.

    Args:
        say: called with each result at once.
        checks: the checks to run.
    """
    made = []
    for check in checks:
        found = check()
        if found is not None:
            say(found)
            made.append(found)
    return made


def show(to_json: Path | None) -> int:
    """Prints all checks; exit code 1 if one has failed.

    Args:
        to_json: None for lines of text; ``-`` for one JSON object on stdout instead; else also a file for it.
    """
    quiet = to_json == Path("-")
    made = check_all(say=(lambda one: None) if quiet else lambda one: print(one, flush=True))
    failed = [one.name for one in made if one.state == FAILED]
    found = {"ok": not failed, "checks": [asdict(one) for one in made]}
    if quiet:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif to_json is not None:
        write_json(to_json, found)
    if not quiet:
        print(f"failed: {', '.join(failed)}" if failed else "everything required is installed and works")
    return 1 if failed else 0
