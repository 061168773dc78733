"""Hosts that ranks run on: how a user specifies them, what must be equal on them, and where their ranks run.

Nothing here connects to a host; `ddp_lab.cluster.processes.remote_launchers` does. A batch system tells a job's
processes which hosts it has allocated:

| system | what it provides | source |
|---|---|---|
| Slurm | ``SLURM_JOB_NODELIST``, ``SLURM_TASKS_PER_NODE``; ``scontrol show hostnames`` expands the first | salloc(1) |
| LSF | ``LSB_MCPU_HOSTS``: ``"a 4 b 4"`` | IBM LSF, environment variables |
| PBS, Torque | ``PBS_NODEFILE``: a file with a line for each process, a host's name | qsub(1B) |
| Grid Engine | ``PE_HOSTFILE``: a file with lines of host, slots, queue, processors | sge_pe(5) |
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...documentation import with_help
from ...errors import ClusterError
from ...formatting import label_of
from ...machine import visible_gpus
from .devices import Placement, place

ALLOCATION = "allocation"
"""What a user gives instead of host names."""

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_EXPAND_SECONDS = 30
_LOCAL = "localhost"
_REMEDY = {
    "Python": "give ranks there the same Python (python=..., --python) or start the notebook with theirs",
    "torch": "install the same torch on both",
    "ddp_lab": "install the same ddp_lab on both",
    "ddp_lab's files": "the version is the same but the files differ: copy or install the same ones",
}


@dataclass(frozen=True)
class Host:
    """One host and its ranks.

    Attributes:
        name: as ssh knows it, ``"user@name"`` and names of ``~/.ssh/config`` included; ``"localhost"`` is this machine,
            without ssh.
        ranks: the ranks there, numbered by host.
    """

    name: str
    ranks: range

    @property
    def local(self) -> bool:
        """Whether it is this machine."""
        return self.name == _LOCAL

    @property
    def words(self) -> str:
        """Name and ranks, for messages."""
        return f"host {self.name} ({label_of(self.ranks)})"


def parse_hosts(hosts: str | Sequence[str] | Mapping[str, int], n: int | None = None) -> tuple[Host, ...]:
    """Which host runs which ranks.

    Args:
        hosts: ``"a:4,b:4"``, ``["a:4", "b:4"]`` or ``{"a": 4, "b": 4}``; or names alone with `n`, which is then divided
            evenly; or ``"allocation"`` for those that a batch system has allocated to this job, with a rank for each of
            its tasks, or `n` ranks divided evenly.
        n: number of ranks of all hosts together.

    Raises:
        ValueError: a number is missing or wrong, or a host is named twice; the message says which.
        ClusterError: there is no allocation.
    """
    if hosts == ALLOCATION:
        given = allocated(os.environ)
        hosts = given if n in (None, sum(given.values())) else list(given)
    counts: dict[str, int | None] = {}
    if isinstance(hosts, Mapping):
        entries: list[tuple[str, Any]] = list(hosts.items())
    else:
        parts = hosts.split(",") if isinstance(hosts, str) else list(hosts)
        entries = [_entry(part.strip()) for part in parts]
    for name, count in entries:
        if name in counts:
            raise ValueError(f"hosts: {name!r} is given twice; give all its ranks at once")
        if not name or name.startswith("-") or any(each.isspace() for each in name):
            raise ValueError(f"hosts: {name!r} is not a valid host name")
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"hosts: {name} can't run {count} ranks")
        counts[name] = count
    if not counts:
        raise ValueError("hosts: give at least one, for example a:4,b:4")
    sizes = _sizes(counts, n)
    made, first = [], 0
    for name, size in zip(counts, sizes, strict=True):
        made.append(Host(name, range(first, first + size)))
        first += size
    return tuple(made)


def _entry(text: str) -> tuple[str, int | None]:
    name, colon, count = text.rpartition(":")
    if not colon:
        return text, None
    if not count.isdigit():
        raise ValueError(f"hosts: {text!r} does not have the form NAME:RANKS, for example a:4")
    return name, int(count)


def _sizes(counts: Mapping[str, int | None], n: int | None) -> list[int]:
    missing = [name for name, count in counts.items() if count is None]
    known = sum(count or 0 for count in counts.values())
    if not missing:
        if n not in (None, known):
            raise ValueError(f"n={n}, but the hosts run {known} ranks in total: omit n")
        return [count or 0 for count in counts.values()]
    if n is None:
        raise ValueError(f"hosts: give the number of ranks on {missing[0]} ({missing[0]}:4), or n for all hosts")
    each, rest = divmod(n - known, len(missing))
    if rest or each < 1:
        raise ValueError(f"n={n} ranks can't be divided evenly among {', '.join(missing)}: give numbers (a:4,b:2)")
    return [each if count is None else count for count in counts.values()]


def provisional(hosts: Sequence[Host]) -> Placement:
    """How many ranks there are, before the hosts' devices are known."""
    size = hosts[-1].ranks.stop
    return Placement(size, ("",) * size, {}, {rank: {} for rank in range(size)})


def check_versions(found: Mapping[str, Mapping[str, str]]) -> None:
    """Compares the installed versions.

    Args:
        found: name of a host -> `ddp_lab.machine.versions` there; the first is what the others must equal.

    Raises:
        ClusterError: a host differs; the message names the host, the difference and the fix.
    """
    names = list(found)
    for name in names:
        if name != names[0] and not found[name]["torch"]:
            said = f"host {name} has no torch: install it there, for the Python that runs the ranks"
            raise ClusterError(with_help(said, "host-without-torch"))
    for what in found[names[0]]:
        # A machine that only runs the notebook needs no torch.
        here = next((name for name in names if found[name][what]), names[0])
        expected = _public(found[here][what])
        for name in names:
            version = _public(found[name][what])
            if version and version != expected:
                said = f"{what}: {version} on host {name}, {expected} on {here}; {_REMEDY[what]}"
                raise ClusterError(with_help(said, "versions-differ"))


def _public(version: str) -> str:
    """The version without its build tag: torch for CPU and torch for GPU can communicate."""
    return version.partition("+")[0]


def address_of(name: str, facts: Mapping[str, Any]) -> str:
    """The IPv4 address by which this machine reached a host.

    Args:
        name: the host's name.
        facts: the value of `ddp_lab.machine.facts` there.

    Raises:
        ClusterError: it has none.
    """
    reached = facts["ssh"][1] if len(facts["ssh"]) == 2 else ""
    own = [address for _, address in facts["addresses"] if not ipaddress.ip_address(address).is_loopback]
    if reached in own or (_is_v4(reached) and not own):
        return str(reached)
    # Over IPv6, or through a translated address.
    try:
        named = socket.gethostbyname(name.rpartition("@")[2])
    except OSError:
        named = ""
    if named in own:
        return named
    if len(own) == 0:
        raise ClusterError(f"host {name} has no IPv4 address except loopback: ranks of other hosts can't reach it")
    return str(own[0])


def _is_v4(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 4
    except ValueError:
        return False


def spread(
    hosts: Sequence[Host],
    facts: Mapping[str, Mapping[str, Any]],
    devices: Sequence[int] | None,
    environment: Mapping[str, str],
    backend: str,
) -> tuple[Placement, dict[str, dict[str, str]]]:
    """Where the ranks of all hosts run.

    Args:
        hosts: with their ranks.
        facts: name -> the value of `ddp_lab.machine.facts` there.
        devices: as for `place`; each host's own.
        environment: variables that the user sets for all ranks.
        backend: as for `place`.

    Returns:
        The placement, and by host the variables of all its ranks.

    Raises:
        ValueError: as `place`, with the host's name.
        ClusterError: some hosts have GPUs and others have none.
    """
    every_device: list[str] = []
    variables: dict[str, dict[str, str]] = {}
    of_ranks: dict[int, dict[str, str]] = {}
    for host in hosts:
        there = facts[host.name]
        limits = {} if there["chosen_gpus"] is None else {"CUDA_VISIBLE_DEVICES": there["chosen_gpus"]}
        gpus = visible_gpus({**limits, **environment}, there["gpus"])
        try:
            made = place(len(host.ranks), devices, environment, backend, gpus, there["cores"], {})
        except ValueError as error:
            raise ValueError(f"host {host.name}: {error}") from None
        every_device += made.devices
        variables[host.name] = made.environment
        of_ranks |= {rank: made.rank_environments[local] for local, rank in enumerate(host.ranks)}
    kinds = {host.name: every_device[host.ranks.start].partition(":")[0] for host in hosts}
    if len(set(kinds.values())) > 1:
        with_gpu = next(name for name, kind in kinds.items() if kind == "cuda")
        without = next(name for name, kind in kinds.items() if kind == "cpu")
        raise ClusterError(
            f"host {with_gpu} has GPUs, but the ranks of host {without} see none: omit one of the hosts, or train on "
            'the CPU everywhere (backend="gloo")'
        )
    return Placement(len(every_device), tuple(every_device), {}, of_ranks), variables


def allocated(environment: Mapping[str, str]) -> dict[str, int]:
    """The hosts of the allocation that this process runs in.

    Args:
        environment: the process's variables.

    Returns:
        host's name -> tasks (Slurm), processes (PBS) or slots (LSF, Grid Engine) there.

    Raises:
        ClusterError: this process does not run in an allocation, or the system's variables can't be read.
    """
    for variable, read in _SYSTEMS.items():
        if environment.get(variable):
            try:
                return read(environment)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise ClusterError(
                    f"hosts: {variable}={environment[variable]!r} can't be read: {error}. Give the hosts (a:4,b:4)"
                ) from error
    raise ClusterError(
        with_help(
            f"hosts: this process is not in an allocation of a batch system ({', '.join(_SYSTEMS)} are not set): start "
            "JupyterLab inside one (salloc, qsub -I, bsub -Is), or give the hosts (a:4,b:4)",
            "no-allocation",
        )
    )


def _slurm(environment: Mapping[str, str]) -> dict[str, int]:
    command = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_EXPAND_SECONDS)
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"scontrol ended with code {done.returncode}")
    names = done.stdout.split()
    counts: list[int] = []
    for part in environment["SLURM_TASKS_PER_NODE"].split(","):
        found = _REPEATED.fullmatch(part)
        if found is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={environment['SLURM_TASKS_PER_NODE']!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return dict(zip(names, counts, strict=True))


def _lsf(environment: Mapping[str, str]) -> dict[str, int]:
    words = environment["LSB_MCPU_HOSTS"].split()
    return {name: int(count) for name, count in zip(words[::2], words[1::2], strict=True)}


def _pbs(environment: Mapping[str, str]) -> dict[str, int]:
    return dict(Counter(Path(environment["PBS_NODEFILE"]).read_text().split()))


def _grid_engine(environment: Mapping[str, str]) -> dict[str, int]:
    lines = Path(environment["PE_HOSTFILE"]).read_text().splitlines()
    return {name: int(slots) for name, slots, *_ in (line.split() for line in lines)}


_SYSTEMS = {
    "SLURM_JOB_NODELIST": _slurm,
    "LSB_MCPU_HOSTS": _lsf,
    "PBS_NODEFILE": _pbs,
    "PE_HOSTFILE": _grid_engine,
}
