"""Where clusters that outlive their notebook are found again: one small file for each, in a folder of this user.

[Note: whom an entry is trusted to name]
A file can be old, and whoever can write to the folder could lie. So the folder has to belong to this user and be closed
to everybody else, the files too, and an entry counts only if its process lives, belongs to this user and began when the
entry says: another process that was given the same number did not. What an entry leads to is a socket, and both of its
ends ask the system who is on the other one. An entry holds no key: the process hands keys out over that socket.

A folder may be shared by machines (a home directory) or containers: entries of another one are left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ClusterError
from ..machine import process_status

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Entry:
    """One cluster.

    Attributes:
        name: its name.
        pid: the process that keeps it.
        identity: of that process, see `identity`.
        machine: where it runs: the system's boot and the space of process numbers.
        socket: path of the socket on which that process answers.
    """

    name: str
    pid: int
    identity: str
    machine: str
    socket: str


def is_name(name: str) -> bool:
    """Whether a cluster can be called so."""
    return _NAME.fullmatch(name) is not None


def folder() -> Path:
    """The folder of this user's entries: below Jupyter's for what runs now (``JUPYTER_RUNTIME_DIR``); made if need be.

    Raises:
        ClusterError: it can't be made, as below a home that is read-only.
        PermissionError: it belongs to somebody else, or is open to others.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    path = Path(jupyter_runtime_dir()) / "ddp_lab"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"detached clusters are listed in {path}, which can't be made ({error.strerror}): set JUPYTER_RUNTIME_DIR "
            "to a folder that can be written"
        ) from error
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder of this user alone: remove it, or `chmod 700` it")
    return path


def identity(pid: int) -> str:
    """When this user's process with this number began; "" if there is none, or somebody else's."""
    try:
        own = os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return ""
    fields = process_status(pid)
    return fields[19] if own and fields and fields[0] not in "ZX" else ""


def machine() -> str:
    """This boot of this system, and its space of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def add(where: Path, name: str, socket: str) -> Entry:
    """Enters this process as the one that keeps a cluster.

    Raises:
        FileExistsError: there is one of that name.
    """
    entry = Entry(name, os.getpid(), identity(os.getpid()), machine(), socket)
    descriptor, draft = tempfile.mkstemp(prefix=".", dir=where)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(entry), file)
        os.link(draft, _path(where, name))  # whole, or not at all, and never over another one
    finally:
        os.unlink(draft)
    return entry


def remove(where: Path, entry: Entry) -> None:
    """Takes an entry away, unless there is another one of that name by now."""
    if _read(_path(where, entry.name)) == entry:
        with contextlib.suppress(FileNotFoundError):
            _path(where, entry.name).unlink()


def entries(where: Path) -> list[Entry]:
    """The clusters of this machine, by name. Entries whose process has ended are removed."""
    found, here = [], machine()
    for path in sorted(where.glob("*.json")):
        entry = _read(path)
        if entry is None or entry.machine != here or path.stem != entry.name:
            continue
        if identity(entry.pid) == entry.identity:
            found.append(entry)
        else:
            remove(where, entry)
    return found


def _path(where: Path, name: str) -> Path:
    if not is_name(name):
        raise ValueError(f"{name!r}: a name is letters, digits, '.', '_' and '-', at most 64")
    return where / f"{name}.json"


def _read(path: Path) -> Entry | None:
    """The entry; None if it is gone, not one, or not this user's alone."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                return None
            fields = json.loads(file.read(1 << 16))
        entry = Entry(**fields)
    except (OSError, ValueError, TypeError):
        return None
    known = {"name": str, "pid": int, "identity": str, "machine": str, "socket": str}
    right = all(isinstance(getattr(entry, name), kind) for name, kind in known.items())
    return entry if right and entry.identity else None
