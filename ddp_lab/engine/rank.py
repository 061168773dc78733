"""An engine's steps to be a rank: connect to the client, join, rejoin.

`connect` is called when the engine has registered. Then the client calls functions by name, each on all ranks:
`prepare` (rank 0 opens the rendezvous, every rank reports its facts), then `join` or `rejoin` with arguments that the
client made from the answers.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..documentation import with_help
from ..errors import ClusterError, FallbackWarning
from ..protocol.messages import EventCost, FindCallSite, InspectGradients, MeasureEventCost
from .groups import registry
from .groups import rejoin as regroup
from .processes import fork_server

_PRELOADED = (
    *("..parallel.distributed", ".agent", ".model_control", ".telemetry", ".debugger.rank_debugger"),
    *(".cells.delivery", ".cells.last_cell", ".cells.name_lookup", ".cells.progress_bars", ".cells.spawned"),
)
_QUIET_SECONDS = 1.0
_log = logging.getLogger(__name__)


class _Rank:
    """This process's state as a rank."""

    listener: socket.socket | None = None
    held: socket.socket | None = None  # reserves a port for a store that the user's code may open
    store: Any = None
    kernel: Any = None
    telemetry: Any = None
    agent: Any = None
    black_box: int | None = None  # descriptor of the file in which it records; None: it has none


_rank = _Rank()


def preload() -> None:
    """Imports the modules that a rank needs besides torch; called once, before the ranks are forked."""
    from .. import native

    native.load()
    for name in _PRELOADED:
        importlib.import_module(name, __package__)


def connect(kernel: Any, rank: int, client: Mapping[str, Any]) -> None:
    """From now on this rank answers the client.

    Args:
        kernel: the engine's.
        rank: this rank.
        client: ``endpoint`` (of its wire), ``world_size``, ``detached`` (whether another client may come later).
    """
    _rank.kernel = kernel
    _rank.black_box = _leave_black_box()
    _start_services(kernel.shell, rank, client)


def _leave_black_box() -> int | None:
    """Records from now on into a file in memory: see [Note: what a dead rank leaves]."""
    from .. import native

    try:
        file = os.memfd_create("black box")
        native.load().leave_in(file)
    except (AttributeError, OSError) as error:  # a sandbox forbids it
        _log.warning("if this rank is killed, its last events are lost: %s", error)
        return None
    return file


def prepare(address: str) -> dict[str, Any]:
    """Reports this rank's facts; rank 0 also opens the next rendezvous, on a port that the system chooses.

    The rendezvous accepts no more connections once the ranks have joined ([Note: a sealed port] in
    `ddp_lab.engine.groups.sockets`). So a store that the user's code opens with ``env://`` has a port of its own,
    which is reserved.

    Args:
        address: of rank 0's host, where the others reach it; loopback if all are on that host.

    Returns:
        ``rank``, ``pid``, ``host``, ``engine`` and ``uuid`` (by which the controller knows it), ``black_box`` (the
        descriptor of the file that it leaves, or None), ``port`` and
        ``users_port`` (None but on rank 0), and what a rejoin must rebuild: ``groups`` and ``group_count``.
    """
    rank, port, users_port = int(os.environ["DDP_LAB_RANK"]), None, None
    if rank == 0:
        if _rank.listener is not None:
            _rank.listener.close()
        _rank.listener = socket.create_server((address, 0), backlog=1024)
        port = _rank.listener.getsockname()[1]
        if _rank.held is not None:
            _rank.held.close()
        _rank.held = socket.socket()
        _rank.held.bind((address, 0))
        _rank.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # listeners with this option may use the port
        users_port = _rank.held.getsockname()[1]
    about = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
    about |= {"engine": _rank.kernel.engine_id, "uuid": _rank.kernel.ident, "black_box": _rank.black_box}
    return {**about, "port": port, "users_port": users_port, **regroup.inventory()}


def join(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Makes this engine a rank: process group, names in the namespace; then one all-reduce.

    Args:
        spec: ``rank``, ``world_size``, ``local_rank``, ``local_world_size``, ``host_index``, ``backend``, ``address``
            and ``port`` (of the rendezvous), ``users_port``, ``interface`` (by which the host reaches the others),
            ``device``, and ``groups``, ``group_count`` and ``broken`` of earlier ranks.

    Returns:
        ``device`` and ``backend`` in words; ``warnings``: missing features of the default group.
    """
    import torch
    import torch.distributed as dist

    import ddp_lab

    from .gpu import Gpu

    _set_environment(spec)
    device = torch.device(spec["device"])
    if device.type == "cuda":
        _check_torch_sees(device)
        torch.cuda.set_device(device)
    told, _ = _make_groups(spec, {})
    _rank.kernel.shell.user_ns.update(
        rank=spec["rank"],
        world_size=spec["world_size"],
        local_rank=spec["local_rank"],
        device=device,
        torch=torch,
        dist=dist,
        ddp_lab=ddp_lab,
    )
    _rank.agent.gpu = Gpu.of(device)
    _rank.agent.joined()
    if not fork_server.format_a_collectives_traceback.cache_info().currsize:
        threading.Thread(target=_warm_up_tracebacks, name="ddp_lab-warm-up", daemon=True).start()
    return {"device": _device_name(device), "backend": _backend(), "warnings": told}


def _start_services(shell: Any, rank: int, client: Mapping[str, Any]) -> None:
    """The object that from now on answers the client and sends it events."""
    from ..diagnosis.on_rank import examine, own_collectives
    from ..parallel.monitoring import group_collectives
    from ..parallel.observe_shards import observe_every_root
    from . import model_control
    from .agent import Agent
    from .cells import cell, last_cell, name_lookup, progress_bars, sources, spawned
    from .cells.delivery import Delivery
    from .debugger.rank_debugger import RankDebugger
    from .telemetry import Telemetry

    registry.install()
    group_collectives.record()
    observe_every_root()
    own_collectives.install(Path(shell.kernel.parent.profile_dir.location))
    progress_bars.install()
    _rank.telemetry = telemetry = Telemetry(client["endpoint"], rank, client["world_size"])
    _rank.agent = Agent(telemetry, rank)
    _rank.agent.install(shell.kernel)
    telemetry.on_control(FindCallSite, examine.find_call_site)
    telemetry.on_control(InspectGradients, _inspect)
    telemetry.on_control(MeasureEventCost, _event_cost)
    if client["detached"]:
        last_cell.install(telemetry)
    Delivery(shell.kernel, telemetry).install()
    _rank.agent.debugger = RankDebugger(shell.kernel, telemetry)
    _rank.agent.debugger.install()
    model_control.install(telemetry)
    name_lookup.install(telemetry)
    cell.prepare(shell)
    sources.install()
    spawned.install()
    telemetry.start()


def rejoin(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces every group of this rank by a new one; variables are kept, and those that hold a group get the new one.

    Args:
        spec: as for `join`; ``groups`` are the user's groups to build again, ``broken`` the models that on some rank
            were in a backward: their gradients are discarded.

    Returns:
        ``rebuilt``: names of the groups that were built again; ``lost``: name -> why one could not be; ``backend`` and
        ``warnings`` as of `join`.
    """
    old = regroup.take_down()
    _rank.store = None
    _set_environment(spec)
    told, lost = _make_groups(spec, old)
    _rank.agent.joined()
    rebuilt = [group["name"] for group in spec["groups"] if group["name"] not in lost]
    return {"rebuilt": rebuilt, "lost": lost, "backend": _backend(), "warnings": told}


def _warm_up_tracebacks() -> None:
    """Pays the cost of the first traceback through `torch.distributed` before a user waits for it.

    Each rank pays, when no cell has run for a second, unless the process that forked it has paid.
    """
    from .cells import cell

    before: tuple[str | None, str | None] | None = None
    while (now := (cell.latest(), cell.running())) != before or now[1] is not None:
        before = now
        time.sleep(_QUIET_SECONDS)
    fork_server.format_a_collectives_traceback()


def _inspect(asked: InspectGradients) -> None:
    """Answers with norm and checksum of a model's averaged gradients, as a description (control thread)."""
    from ddp_lab.parallel.monitoring.inspection import request_inspection

    request_inspection(asked.reducer, asked.step)


def _event_cost(asked: MeasureEventCost) -> EventCost:
    """On the control thread; takes about 10 ms."""
    from ddp_lab import recording

    return EventCost(recording.statistics(measure=True).ns_per_event)


def _set_environment(spec: Mapping[str, Any]) -> None:
    """The environment variables that torchrun sets, for code that reads them."""
    os.environ.update(
        RANK=str(spec["rank"]),
        WORLD_SIZE=str(spec["world_size"]),
        LOCAL_RANK=str(spec["local_rank"]),
        LOCAL_WORLD_SIZE=str(spec["local_world_size"]),
        GROUP_RANK=str(spec["host_index"]),
        ROLE_RANK=str(spec["rank"]),
        ROLE_WORLD_SIZE=str(spec["world_size"]),
        MASTER_ADDR=spec["address"],
        MASTER_PORT=str(spec["users_port"]),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", spec["interface"])
    if spec["interface"] != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=" + spec["interface"])  # "=": exactly this one, not a prefix


def _make_groups(spec: Mapping[str, Any], old: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Makes all groups, whose former ones are `old`, and runs a first collective.

    Returns:
        Missing features of the default group, in words; name -> why another one could not be made.
    """
    import torch

    told, device = _open_default_group(spec), torch.device(spec["device"])
    lost = regroup.rebuild(old, spec["groups"], spec["group_count"])
    regroup.discard_gradients(spec["broken"])
    _first_collective(device)
    return told + _seal(device), lost


def _open_default_group(spec: Mapping[str, Any]) -> list[str]:
    """Returns missing features of the group, in words: a warning would not be seen here."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from .. import comm

    comm.register()
    if "mpi" in spec["backend"]:
        comm.mpi.check_started(spec["world_size"])
    registry.exclude_port(spec["port"])
    listener: dict[str, Any] = {}
    if _rank.listener is not None:
        listener = {"master_listen_fd": _rank.listener.detach()}
        _rank.listener = None
    _rank.store = TCPStore(
        spec["address"], spec["port"], spec["world_size"], is_master=bool(listener), wait_for_workers=False, **listener
    )
    bound = registry.bound_to(torch.device(spec["device"]), spec["backend"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", FallbackWarning)
        dist.init_process_group(
            spec["backend"], store=_rank.store, rank=spec["rank"], world_size=spec["world_size"], **bound
        )
    told = [one for one in warned if issubclass(one.category, FallbackWarning)]
    for other in warned:
        if other not in told:
            warnings.showwarning(other.message, other.category, other.filename, other.lineno)
    return [str(one.message) for one in told]


def _backend() -> str:
    """The default group's backends by device; one that goes through Gloo is Gloo."""
    import torch
    import torch.distributed as dist

    backends: str = dist.get_backend_config()
    if "cpu:shm" not in backends:
        return backends
    group: Any = dist.group.WORLD
    return backends.replace("cpu:shm", f"cpu:{group._get_backend(torch.device('cpu')).name()}")


def _check_torch_sees(device: Any) -> None:
    """Raises `ClusterError` if the driver reports this GPU and torch can't use it."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() <= device.index:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
        raise ClusterError(
            with_help(
                f"torch {torch.__version__}, built {built}, can't use {device}, which the driver reports: install a "
                'torch for this driver\'s CUDA, or start CPU ranks (backend="gloo", `%cluster start --backend gloo`)',
                "torch-without-gpus",
            )
        )


def _first_collective(device: Any) -> None:
    """Ready means that every rank has finished a real all-reduce, on the CPU and on its device."""
    import torch
    import torch.distributed as dist

    for place in {torch.device("cpu"), device} if "gloo" in dist.get_backend_config() else {device}:
        ones = torch.ones(1, device=place)
        dist.all_reduce(ones)
        if ones.item() != dist.get_world_size():
            said = f"the test all-reduce on {place} returned {ones.item()}, expected {dist.get_world_size()}"
            raise ClusterError(with_help(said, "wrong-all-reduce"))


def _seal(device: Any) -> list[str]:
    """After a collective over all ranks, each of them is connected; NCCL connects to the store later, too.

    Returns:
        A warning, if the kernel refuses it.
    """
    why = (registry.seal_store() if device.type == "cpu" else "") or registry.unsealed()
    said = "other users of this machine can connect to the ports of torch's store and Gloo: the kernel refused a filter"
    return [f"{said} ({why}). See SECURITY.md"] if why else []


def _device_name(device: Any) -> str:
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
