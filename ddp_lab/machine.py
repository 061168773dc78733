"""Facts about the machine that a process runs on: clock, versions, GPUs, addresses; Python's collector (no torch)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_FIRST_TIME_NAMESPACE = "time:[4026531834]"  # Linux's number of the initial namespace
_CHOSEN = "CUDA_VISIBLE_DEVICES"
_FILES_MORE = 1024  # suggested limit
_THREAD = 8 << 20  # bytes of a thread's stack: without them no thread can begin


def facts() -> dict[str, Any]:
    """Facts about a host that a client needs before ranks start there, JSON-able.

    ``host`` (its name), ``pid`` and ``started`` (of this process), ``versions``, ``clock``, ``cores``, ``gpus``
    (present ones) and ``chosen_gpus`` (the variable that limits them, or None), ``ssh`` (addresses of both ends of the
    ssh connection that started this process; empty without one) and ``addresses`` (pairs of interface and IPv4
    address).
    """
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "versions": versions(),
        "clock": host_clock(),
        "cores": cores(),
        "gpus": count_gpus(),
        "chosen_gpus": os.environ.get(_CHOSEN),
        "ssh": os.environ.get("SSH_CONNECTION", "").split()[::2],
        "addresses": _addresses(),
    }


def cores() -> int:
    """How many cores this process may use: those it is bound to, and no more than its control group's quota."""
    bound = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # another version of control groups, or none
        return bound
    return bound if quota == "max" else max(1, min(bound, round(int(quota) / int(period))))


def host_clock() -> str:
    """An id that all processes with the same monotonic clock share: the boot id of this host.

    A container may have a monotonic clock of its own; then its namespace's number is added.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # the kernel has no time namespaces
        return boot
    return boot if namespace == _FIRST_TIME_NAMESPACE else f"{boot} {namespace}"


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts of a cluster: Python, torch, ddp_lab, and ddp_lab's source text."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _version("torch"),
        "ddp_lab": _version("ddp_lab"),
        "ddp_lab's files": _digest(),
    }


def started(pid: int) -> str:
    """When a process was started, in the kernel's ticks since the boot, with the boot's name; "" if there is none.

    Together with the process id it identifies one process, across time and hosts.
    """
    fields = process_status(pid)
    return f"{host_clock()} {fields[19]}" if fields else ""


def stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP, SIGTSTP) or a debugger."""
    return process_status(pid)[:1] in (["T"], ["t"])


def ended(pid: int) -> bool:
    """Whether a process has ended, also if its parent has not yet taken note of that."""
    return process_status(pid)[:1] in ([], ["Z"], ["X"])


def process_status(pid: int) -> list[str]:
    """The kernel's fields on a process (proc_pid_stat(5)) from its state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def hindrances(pid: int) -> list[str]:
    """What keeps a process of this user from continuing, each with a fix, in words: it is stopped by a signal, or has
    reached a limit of the system.
    """
    stop = [f"is stopped (SIGSTOP): `kill -CONT {pid}` resumes it"] if stopped(pid) else []
    return stop + used_up(pid)


def used_up(pid: int) -> list[str]:
    """The limits of the system that a process of this user has reached, each with a fix, in words.

    Empty if the system does not report them, and for a process that has ended.
    """
    found = []
    try:
        files, most_files = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        if sum(int(number) < files for number in os.listdir(f"/proc/{pid}/fd")) >= files >= 0:
            more = _more(pid, "nofile", "n", files, most_files, max(_FILES_MORE, 2 * files))
            found.append(f"has reached its limit of {files} open files: {more}")
        size, most = resource.prlimit(pid, resource.RLIMIT_AS)
        taken = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        if size != resource.RLIM_INFINITY and size - taken < _THREAD:
            more = _more(pid, "as", "v", size, most, None)
            found.append(f"has reached its memory limit ({size / 2**20:,.0f} MiB of address space): {more}")
    except OSError:  # it has ended, or may not be inspected
        pass
    return found


def _more(pid: int, name: str, option: str, soft: int, hard: int, wanted: int | None) -> str:
    """How to raise a process's limit, at most to its hard limit. Numbers that are None have no limit."""
    endless = hard == resource.RLIM_INFINITY
    if not endless and soft >= hard:
        return f"restart Python or Jupyter with a higher limit (`ulimit -{option}`)"
    most = "unlimited" if endless else str(hard)
    if wanted is not None:
        most = str(wanted if endless else min(wanted, hard))
    return f"`prlimit --pid {pid} --{name}={most}:` raises it"


def visible_gpus(environment: Mapping[str, str], present: int | None = None) -> list[str]:
    """The GPUs that torch would see, each as ``CUDA_VISIBLE_DEVICES`` names it.

    Args:
        environment: variables of the process in question.
        present: number of GPUs of the machine; None asks the driver.
    """
    chosen = environment.get(_CHOSEN)
    present = count_gpus() if present is None else present
    if chosen is None:
        return [str(index) for index in range(present)]
    visible = []
    for entry in (part.strip() for part in chosen.split(",")):
        if present == 0 or not entry or (entry.lstrip("-").isdigit() and not 0 <= int(entry) < present):
            break  # CUDA ignores an invalid entry and all after it
        visible.append(entry)
    return visible


def count_gpus() -> int:
    """The number of GPUs according to the driver's management library; 0 if there is none."""
    library = nvml()
    if library is None:
        return 0
    count = ctypes.c_uint()
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    return 0 if failed else count.value


def nvml() -> ctypes.CDLL | None:
    """The driver's management library, initialised; None if there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def local_address(peer: str) -> str:
    """The IPv4 address of this machine from which packets to `peer` are sent; sends nothing.

    Raises:
        OSError: there is no route to it, or no such name.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address; "" if none does."""
    return next((name for name, found in _addresses() if found == address), "")


def _addresses() -> list[tuple[str, str]]:
    import psutil

    return [
        (name, each.address)
        for name, all_of_it in psutil.net_if_addrs().items()
        for each in all_of_it
        if each.family == socket.AF_INET
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _digest() -> str:
    """A hash of all Python files of this package, since versions say little during development."""
    made = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        made.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return made.hexdigest()[:12]


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Nothing is collected within the block, and what it has made is never looked at again, not even at the exit.

    For imports, and for reading millions of objects that stay: the collector would visit them all again and again.
    """
    was = gc.isenabled()
    gc.collect()  # else what is garbage already would stay, too
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
