"""The commands that start a process on another host with its input and output here: ssh, or a batch system's own.

Inside an allocation of a batch system, its command reaches the allocated hosts without keys, and the system accounts
for the processes there and ends them with the job. Like ssh, all these commands forward the standard streams.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ...protocol.entry_points import HOST_SERVER

_HOST = "{host}"
_CONNECT_SECONDS = 10
_THROUGH_A_SHELL = ("ssh", "rsh")  # these pass the words to a shell on the other host

_COMMANDS: dict[str, tuple[str, ...]] = {
    # A job step of its own in the allocation, with all its processors and GPUs.
    "slurm": (
        "srun",
        f"--nodelist={_HOST}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--unbuffered",
        "--cpu-bind=none",
        "--export=ALL",
    ),
    "mpi": ("mpiexec", "-n", "1", "-host", _HOST, "-bind-to", "none"),
}
LAUNCHERS = ("ssh", *_COMMANDS)
"""The commands that start ranks on other hosts, by name."""


def of_batch_system(launcher: str | Sequence[str]) -> bool:
    """Whether it is the command of a batch system: such a system also knows which hosts there are."""
    return launcher in _COMMANDS if isinstance(launcher, str) else False


def check_launcher(launcher: str | Sequence[str]) -> None:
    """Refuses values that do not name a command.

    Raises:
        ValueError: it is neither a known name nor a command with a place for the host.
    """
    if isinstance(launcher, str):
        if launcher not in LAUNCHERS:
            known = ", ".join(LAUNCHERS)
            raise ValueError(
                f'launcher={launcher!r}: choose one of {known}, or give a command (["blaunch", "{_HOST}"])'
            )
    elif not any(_HOST in word for word in launcher):
        raise ValueError(f"launcher={list(launcher)}: a command needs {_HOST} where the host's name goes")


def host_command(launcher: str | Sequence[str], host: str, python: str, host_timeout: float) -> list[str]:
    """The command that starts a host's fork server and forwards its standard input and output.

    Args:
        launcher: one of `LAUNCHERS`; or a command's words, with ``{host}`` where the host's name goes, to which those
            that start the server are added.
        host: the host's name.
        python: the Python there.
        host_timeout: the time after which a silent host is lost.
    """
    if launcher == "ssh":
        return _ssh(host, python, host_timeout)
    words = [word.replace(_HOST, host) for word in (_COMMANDS[launcher] if isinstance(launcher, str) else launcher)]
    through_a_shell = Path(words[0]).name in _THROUGH_A_SHELL
    return [*words, *([_for_a_shell(python)] if through_a_shell else [python, "-m", HOST_SERVER])]


def _for_a_shell(python: str) -> str:
    return f"exec {shlex.quote(python)} -m {HOST_SERVER}"


def _ssh(host: str, python: str, host_timeout: float) -> list[str]:
    """The user's ``~/.ssh/config`` applies, except for options that would break the channel.

    No terminal, no forwarding, no prompts. An existing shared connection is used.
    """
    # Needed only if this process is killed during a network outage: nothing else would end ssh then.
    alive = max(15, round(host_timeout))
    options = {
        "BatchMode": "yes",
        "ClearAllForwardings": "yes",
        "ConnectTimeout": str(_CONNECT_SECONDS),
        "ControlMaster": "no",
        "EscapeChar": "none",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "LogLevel": "ERROR",
        "PermitLocalCommand": "no",
        "RemoteCommand": "none",
        "ServerAliveCountMax": "3",
        "ServerAliveInterval": str(alive),
    }
    flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *flags, "--", host, _for_a_shell(python)]
