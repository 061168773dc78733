"""What SECURITY.md promises of tools for assistants: a private socket, always a token, nothing on a port."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import ddp_lab
from ddp_lab import ClusterError
from ddp_lab.assistants import rendezvous
from ddp_lab.assistants.rendezvous import Invitation
from ddp_lab.protocol import registry
from tests.security.looking import listening

LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


@pytest.fixture
def invitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Invitation]:
    """A server without a cluster: who is refused never gets as far as that."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    with ddp_lab.serve_mcp():
        yield rendezvous.find()


def asked(invitation: Invitation, **headers: str) -> httpx2.Response:
    """The answer to a request with these headers."""
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=invitation.socket)) as client:
        accept = {"Accept": "application/json, text/event-stream"}
        return client.post("http://localhost/mcp", json=LIST, headers=accept | headers)


def bearer(token: str) -> dict[str, str]:
    """The header that holds a token."""
    return {"Authorization": f"Bearer {token}"}


def test_a_token_is_always_required(invitation: Invitation) -> None:
    """Without the token, with another one and with a part of it a request is refused with 401; with it, answered. A
    token of 256 random bits ends with its server. The server listens on a Unix socket alone."""
    assert asked(invitation).status_code == 401
    for wrong in ("x" * len(invitation.token), invitation.token[:-1], "é", "x y"):
        refused = asked(invitation, Authorization=f"Bearer {wrong}".encode())  # type: ignore[arg-type]
        assert refused.status_code == 401
        assert "cluster_status" not in refused.text
    answered = asked(invitation, **bearer(invitation.token))
    assert (answered.status_code, "cluster_status" in answered.text) == (200, True)
    with ddp_lab.serve_mcp():
        second = rendezvous.find()
        assert second.token != invitation.token
        assert len(second.token) == 43
        assert asked(second, **bearer(invitation.token)).status_code == 401
    assert listening(os.getpid()) == {}


@pytest.mark.parametrize(("name", "value", "status"), [("Host", "evil.example", 421), ("Origin", "http://a.b", 403)])
def test_web_pages_are_refused(invitation: Invitation, name: str, value: str, status: int) -> None:
    """A request for another host name, or from a web page, is refused even with the token."""
    assert asked(invitation, **bearer(invitation.token), **{name: value}).status_code == status


def test_files_and_folders_are_private(invitation: Invitation) -> None:
    """Folders have mode 0700 and files 0600; the entry does not hold the token. The token is sent to no socket in a
    folder that is open to others."""
    folder, entries = Path(invitation.socket).parent, registry.folder() / "mcp"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, entries)] == [0o700, 0o700]
    (entry,) = entries.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (entry, *folder.glob("[mt]*"))] == [0o600] * 3
    assert invitation.token not in entry.read_text()
    assert {path.name for path in folder.iterdir()} == {"machine", "socket", "token"}
    Path(invitation.socket).parent.chmod(0o755)
    with pytest.raises(ClusterError, match="not a private folder"):
        rendezvous.find()


def test_it_is_off_unless_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the package and its magics serves nothing, and loads no library for it."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    code = "import sys, ddp_lab.notebook.magics, ddp_lab.assistants.kernel_server; print('mcp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    with pytest.raises(ClusterError, match="no notebook serves assistants"):
        rendezvous.find()


def test_a_killed_server_leaves_nothing_that_leads_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL the entry no longer counts, and the next server removes the folder."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    code = "import ddp_lab, os; ddp_lab.serve_mcp(); print('serves', flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (killed.returncode, killed.stdout) == (-9, "serves\n")
    (entry,) = (registry.folder() / "mcp").iterdir()
    folder = Path(registry._read(entry).socket).parent  # type: ignore[union-attr]
    assert folder.exists()
    with pytest.raises(ClusterError, match="no notebook serves assistants"):
        rendezvous.find()
    with ddp_lab.serve_mcp():
        assert not folder.exists()
