"""A machine as hosted notebooks have it, made of namespaces of this one (needs root)."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.leftovers import MARK
from tests.notebooks.confined import WORK
from tests.waiting import wait_until

MEMORY_BYTES = 12 << 30
REFUSED = ("ptrace", "process_vm_readv", "process_vm_writev")
PYTHON = "/srv/venv/bin/python"
_UNSHARE = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--mount-proc", "--fork", "--kill-child"]
_CGROUPS = Path("/sys/fs/cgroup")
# A package manager's settings and certificates are this machine's; all else is the container's own.
_KEPT = ("PIP_", "UV_", "SSL_CERT", "REQUESTS_CA", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http", "no_proxy", MARK)


def why_not() -> str:
    """Why this machine can't have such a container; empty if it can."""
    if os.geteuid() != 0:
        return "mounts and process namespaces need root"
    if platform.machine() != "x86_64":
        return "the numbers of system calls are those of x86-64"
    if shutil.which("unshare") is None or not Path("/srv").is_dir():
        return "no unshare (Debian: apt install util-linux), or no /srv to mount over"
    tried = subprocess.run([*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/srv"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


class Container:
    """Two cores, 12 GB, a /dev/shm of 64 MiB, no compiler, processes of its own, root without any capability.

    ptrace, process_vm_readv and process_vm_writev are refused. In the home folder, /srv/home, only `work` can be
    written; so can /tmp, and the environment /srv/venv, in which there is pip alone. The network is this machine's.

    Args:
        folder: holds all that is written there.

    Attributes:
        work: the folder of the home that can be written, as seen from here.
        tmp: its /tmp, as seen from here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cgroup = _cgroup()
        self.work, self.tmp = folder / "home" / "work", folder / "tmp"
        for made in (self.work, self.tmp):
            made.mkdir(parents=True)
        self.tmp.chmod(0o1777)

    def install_python(self) -> None:
        """Makes the environment, with pip alone in it."""
        self.call(getattr(sys, "_base_executable", sys.executable), "-m", "venv", "/srv/venv")
        self.call(PYTHON, "-m", "pip", "install", "--quiet", "--upgrade", "pip")

    def run(self, *command: str | Path, refused: Sequence[str] = REFUSED) -> subprocess.CompletedProcess[str]:
        """Runs a command as the first process of the container, in `work`; all that it started ends with it."""
        return subprocess.run(self._confined(command, refused), env=self._environment(), capture_output=True, text=True)

    def call(self, *command: str | Path, refused: Sequence[str] = REFUSED) -> str:
        """The same for a command that must succeed: what it printed."""
        done = self.run(*command, refused=refused)
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install_torch(self, release: str) -> None:
        """What a hosted notebook has from the beginning."""
        self.call(PYTHON, "-m", "pip", "install", "--quiet", f"torch=={release}")

    def killed_for_memory(self) -> int | None:
        """How many of its processes were killed because 12 GB were used; None if this machine can't limit memory."""
        if self._cgroup is None:
            return None
        counts = "memory.oom_control" if _is_old(self._cgroup.parent) else "memory.events"
        lines = dict(line.split() for line in (self._cgroup / counts).read_text().splitlines())
        return int(lines["oom_kill"])

    def close(self) -> None:
        """Gives the limit of memory back. The folder is its owner's."""
        if self._cgroup is not None:
            wait_until(lambda: not (self._cgroup / "cgroup.procs").read_text(), "the end of the container")
            self._cgroup.rmdir()

    def _confined(self, command: Sequence[str | Path], refused: Sequence[str]) -> list[str]:
        confine = [sys.executable, Path(__file__).with_name("confined.py"), self._folder, self._cgroup or ""]
        return [str(one) for one in (*_UNSHARE, *confine, ",".join(refused), *command)]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        return {
            **kept,
            "HOME": str(WORK.parent),
            "LANG": "C.UTF-8",
            "JUPYTER_RUNTIME_DIR": "/tmp/jupyter",  # where hosts let their Jupyter write
            "PATH": os.environ["PATH"],
        }


def _cgroup() -> Path | None:
    """A new group of processes that may use 12 GB together; None where there can be none."""
    for parent in (_CGROUPS / "memory", _CGROUPS):
        limit = "memory.limit_in_bytes" if _is_old(parent) else "memory.max"
        made = parent / f"ddp_lab-restricted-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        if (made / limit).exists():
            (made / limit).write_text(str(MEMORY_BYTES))
            return made
        made.rmdir()
    return None


def _is_old(parent: Path) -> bool:
    return parent.name == "memory"


@contextlib.contextmanager
def container(folder: Path) -> Iterator[Container]:
    """A container that has a Python, until the block ends."""
    made = Container(folder)
    try:
        made.install_python()
        yield made
    finally:
        made.close()
