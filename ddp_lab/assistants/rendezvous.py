"""How `ddp-lab mcp` finds the kernels that serve assistants: an entry for each, and a private folder with its token.

The entries are like those of detached clusters (`ddp_lab.protocol.registry`), in a folder beside them. An entry leads
to a socket; the token is in a file beside the socket. Folders have mode 0700 and files 0600.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ClusterError
from ..protocol import registry

__all__ = ["Door", "Invitation", "find"]

_LONGEST_PATH = 100  # of a Unix socket, 107 at most
_FOLDER = re.compile(r"ddp_lab-(\d+)-mcp-")


@dataclass(frozen=True)
class Invitation:
    """A kernel that serves assistants.

    Attributes:
        pid: its process.
        socket: path of the socket.
        token: what a request must hold.
    """

    pid: int
    socket: str
    token: str


class Door:
    """This process's socket and token, until `close`.

    Raises:
        ClusterError: they can't be made.

    Attributes:
        listener: the socket, which listens.
        invitation: what leads to it.
    """

    def __init__(self) -> None:
        _remove_remains()
        self._folder = _private_folder()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = str(self._folder / "socket")
            self.listener.bind(path)
            self.listener.listen()
            self.invitation = Invitation(os.getpid(), path, secrets.token_urlsafe(32))
            _write_private(self._folder / "machine", registry.machine())
            _write_private(self._folder / "token", self.invitation.token)
        except OSError as error:
            self.listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ClusterError(f"assistants can't be served: {error}") from error
        self._entry: registry.Entry | None = None

    def open(self) -> None:
        """Writes the entry: from now on `find` finds it."""
        self._entry = registry.add(_entries_folder(), _name(os.getpid()), self.invitation.socket)

    def close(self) -> None:
        """Removes entry, socket and token."""
        if self._entry is not None:
            registry.remove(_entries_folder(), self._entry)
        self.listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def find(pid: int | None = None) -> Invitation:
    """The kernel of this user that serves assistants.

    Args:
        pid: its process; None if there is only one.

    Raises:
        ClusterError: there is none, or there are several.
    """
    found = {entry.pid: entry for entry in registry.entries(_entries_folder())}
    if not found:
        raise ClusterError(
            "no notebook serves assistants: run `%cluster mcp` in the notebook that has the cluster (`ddp-lab mcp "
            "--recording PATH` serves a recorded run)"
        )
    listed = ", ".join(map(str, sorted(found)))
    if pid is not None and pid not in found:
        raise ClusterError(f"process {pid} does not serve assistants; these do: {listed}")
    if pid is None and len(found) > 1:
        raise ClusterError(f"several notebooks serve assistants: choose one, `ddp-lab mcp --process PID`, of {listed}")
    entry = found[pid if pid is not None else next(iter(found))]
    return Invitation(entry.pid, entry.socket, _token(Path(entry.socket).parent))


def _token(folder: Path) -> str:
    """The token in a folder that is private to this user.

    Raises:
        ClusterError: it is not, or has been removed.
    """
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ClusterError(f"{folder} is not a private folder of this user: its notebook is not trusted")
        return (folder / "token").read_text(encoding="ascii")
    except OSError as error:
        raise ClusterError(f"the notebook has just stopped serving assistants ({error.strerror})") from error


def _entries_folder() -> Path:
    path = registry.folder() / "mcp"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _name(pid: int) -> str:
    return f"process-{pid}"


def _private_folder() -> Path:
    prefix = f"ddp_lab-{os.getpid()}-mcp-"
    made = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(made / "socket")) > _LONGEST_PATH:
        made.rmdir()
        made = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    return made


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)


def _remove_remains() -> None:
    """Removes the folders of this user's processes that were killed; their tokens lead nowhere.

    Containers may share the folder of temporary files: those of other machines are left alone.
    """
    here = registry.machine()
    for path in Path(tempfile.gettempdir()).glob("ddp_lab-*-mcp-*"):
        named = _FOLDER.match(path.name)
        with contextlib.suppress(OSError):
            ours = named and path.lstat().st_uid == os.getuid() and (path / "machine").read_text() == here
            if named and ours and not registry.identity(int(named[1])):
                shutil.rmtree(path)
