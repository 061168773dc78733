"""What encloses the cells of a script: its header, options, the process group, and its end.

[Note: sections of a script]
Lines that begin with `# %%` divide a script into cells. Sections whose name begins with `ddp_lab:` do what a cluster
does; `ddp_lab.notebook.scripts.split` omits them.
"""

from __future__ import annotations

from ..._version import __version__
from ...printable import printable
from .imports import Imports
from .settings import StartSettings

__all__ = ["EVENTS", "OURS", "around", "command"]

OURS = "ddp_lab:"
"""What the names of the sections begin with that a cluster makes unnecessary."""
EVENTS = "events"
_OWN_OPTIONS = {"n", "backend", "threads", "seed", "help", "h"}

_START = """\
for_threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
os.environ.update(dict.fromkeys(for_threads, str(options.threads)))
if "RANK" not in os.environ:  # without torchrun: start it
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.n)]
    os.execv(sys.executable, [*torchrun, *sys.argv])"""

_JOIN = """\
torch.set_num_threads(options.threads)
if options.backend == "auto":
    options.backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "shm"
if options.backend in ("shm", "mpi"):
    import ddp_lab.comm  # noqa: F401  registers these backends
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cpu")
if "nccl" in options.backend:
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # NCCL refuses two ranks of one host on a GPU
dist.init_process_group(options.backend)
rank, world_size = dist.get_rank(), dist.get_world_size()
seed = [torch.initial_seed() if options.seed is None else options.seed]
dist.broadcast_object_list(seed, src=0)  # all ranks of a cluster begin with one seed
torch.manual_seed(seed[0])"""

_PUSH = '''\
def pushed_by_rank_0(values):
    """The values of rank 0, on every rank."""
    box = [values]
    dist.broadcast_object_list(box, src=0)
    return box[0]'''

_SHARE_OF_CORES = 'max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))'


def command(settings: StartSettings, script: str) -> str:
    """The command that starts the script with as many ranks as the notebook had; of several hosts, the one for each."""
    hosts = settings.hosts.split(",") if settings.hosts else []
    if len(hosts) < 2:
        return f"torchrun --standalone --nproc-per-node {settings.n} {script}"
    first = hosts[0].partition(":")[0]
    each = max(1, settings.n // len(hosts))
    place = f"--rdzv-backend c10d --rdzv-endpoint {first}:29400"
    return f"torchrun --nnodes {len(hosts)} --nproc-per-node {each} {place} {script}"


def around(
    body: str, imports: Imports, settings: StartSettings, origin: str, script: str, *, pushes: bool, events: bool
) -> str:
    """The whole script.

    Args:
        body: the cells' code.
        imports: what stands above it.
        settings: of the start of the ranks.
        origin: the notebook's name.
        script: the script's name.
        pushes: whether the code needs what a push does.
        events: whether it needs an event loop.
    """
    if events:
        imports.add_line("import asyncio")
    join = _JOIN
    if pushes:
        join += f"\n\n\n{_PUSH}"
    if events:
        join += f"\n\n{EVENTS} = asyncio.new_event_loop()"
    future = [f"from __future__ import {', '.join(imports.future)}", ""] if imports.future else []
    return "\n".join(
        [
            *_header(settings, origin, script),
            "",
            *future,
            f"# %% {OURS} options, set before torch is imported",
            "import argparse\nimport os\nimport sys",
            "",
            *_options(settings),
            "",
            "# %% imports",
            *imports.lines(),
            "",
            f"# %% {OURS} the process group, and the names that ranks have",
            join,
            "",
            body,
            "",
            f"# %% {OURS} the end",
            "dist.destroy_process_group()",
            "",
        ]
    )


def _header(settings: StartSettings, origin: str, script: str) -> list[str]:
    where = f" on each of the hosts {settings.hosts}" if "," in settings.hosts else ""
    lines = [
        f"# Written by ddp_lab {__version__} from {printable(origin)}. Run it on {settings.n} ranks, as there{where}:",
        "#",
        f"#     {printable(command(settings, script))}",
        "#",
    ]
    if not where:
        lines.append(f"# `python {printable(script)} -n {settings.n}` does the same. `--help` lists the options.")
    return [*lines, "# ruff: noqa: E402"]


def _options(settings: StartSettings) -> list[str]:
    """The lines that read the options and set the environment."""
    threads = _SHARE_OF_CORES if settings.threads is None else str(settings.threads)
    add = "parser.add_argument"
    lines = [
        f"threads = {threads}",
        "parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)",
        f'{add}("-n", type=int, default={settings.n}, help="number of ranks, if torchrun does not start the script")',
        f'{add}("--backend", default="{settings.backend}", help="backend of the process group: nccl, gloo, shm")',
        f'{add}("--threads", type=int, default=threads, help="threads of torch on each rank")',
    ]
    lines.append(f'{add}("--seed", type=int, help="seed of torch on all ranks; None: a random one")')
    assign = []
    for name, value in settings.env.items():
        option = f"--env-{name}" if name in _OWN_OPTIONS else f"--{name}"
        lines.append(f'{add}("{option}", dest="env_{name}", default={value!r}, help="environment variable")')
        assign.append(f'os.environ["{name}"] = options.env_{name}')
    return [*lines, "options = parser.parse_args()", _START, *assign]
