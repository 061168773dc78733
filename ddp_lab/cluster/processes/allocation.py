"""The hosts that a batch system has given to this job, as it tells them to the job's processes.

| system | what it tells | source |
|---|---|---|
| Slurm | ``SLURM_JOB_NODELIST``, ``SLURM_TASKS_PER_NODE``; ``scontrol show hostnames`` expands the first | salloc(1) |
| LSF | ``LSB_MCPU_HOSTS``: ``"a 4 b 4"`` | IBM LSF, environment variables |
| PBS, Torque | ``PBS_NODEFILE``: a file with a line for each process, a host's name | qsub(1B) |
| Grid Engine | ``PE_HOSTFILE``: a file with lines of host, slots, queue, processors | sge_pe(5) |
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ...errors import ClusterError

__all__ = ["ALLOCATION", "allocated"]

ALLOCATION = "allocation"
"""What a user names instead of hosts."""

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_EXPAND_SECONDS = 30


def allocated(environment: Mapping[str, str]) -> dict[str, int]:
    """The hosts of the allocation that this process runs in.

    Args:
        environment: the process's variables.

    Returns:
        host's name -> tasks (Slurm), processes (PBS) or slots (LSF, Grid Engine) there.

    Raises:
        ClusterError: this process runs in no allocation, or what the system says can't be read.
    """
    for variable, read in _SYSTEMS.items():
        if environment.get(variable):
            try:
                return read(environment)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise ClusterError(
                    f"hosts: {variable}={environment[variable]!r} can't be read: {error}. Name the hosts (a:4,b:4)"
                ) from error
    raise ClusterError(
        f"hosts: this process runs in no allocation of a batch system ({', '.join(_SYSTEMS)} are not set): start "
        "JupyterLab inside one (salloc, qsub -I, bsub -Is), or name the hosts (a:4,b:4)"
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
