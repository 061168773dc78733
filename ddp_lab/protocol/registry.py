"""The registry of detached clusters: one small file for each, in a folder of this user.

[Note: whom an entry is trusted to name]
A file can be old, and anyone who can write to the folder could forge one. So the folder must belong to this user and be
closed to all others, like the files. An entry counts only if its process is alive, belongs to this user and started
when the entry says, which a process that reuses the number did not. An entry leads to a socket, and both of its ends
ask the kernel who the other one is. An entry contains no key: the process sends keys over that socket.

Machines (sharing a home directory) or containers may share the folder: entries of others are left alone.
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
        pid: its keeper's process.
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
    """Whether this is a valid name of a cluster."""
    return _NAME.fullmatch(name) is not None


def folder() -> Path:
    """The folder of this user's entries, in Jupyter's runtime folder (``JUPYTER_RUNTIME_DIR``); created if needed.

    Raises:
        ClusterError: it can't be created, e.g. in a read-only home directory.
        PermissionError: it belongs to another user, or is open to others.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    path = Path(jupyter_runtime_dir()) / "ddp_lab"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ClusterError(
            f"the folder {path} of detached clusters can't be created ({error.strerror}): set JUPYTER_RUNTIME_DIR to a "
            "writable folder"
        ) from error
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private folder of this user: remove it, or `chmod 700` it")
    return path


def identity(pid: int) -> str:
    """When this user's process with this number began; "" if there is none, or it is another user's."""
    try:
        own = os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return ""
    fields = process_status(pid)
    return fields[19] if own and fields and fields[0] not in "ZX" else ""


def machine() -> str:
    """This boot of this system, and its namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def add(where: Path, name: str, socket: str) -> Entry:
    """Registers this process as the keeper of a cluster.

    Raises:
        FileExistsError: the name is taken.
    """
    entry = Entry(name, os.getpid(), identity(os.getpid()), machine(), socket)
    descriptor, draft = tempfile.mkstemp(prefix=".", dir=where)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(entry), file)
        os.link(draft, _path(where, name))  # atomic, and never overwrites another one
    finally:
        os.unlink(draft)
    return entry


def remove(where: Path, entry: Entry) -> None:
    """Removes an entry, unless another one has that name by now."""
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
        raise ValueError(f"{name!r} is not a valid name: use letters, digits, '.', '_' and '-', at most 64")
    return where / f"{name}.json"


def _read(path: Path) -> Entry | None:
    """The entry; None if it was removed, is invalid, or is not private to this user."""
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
