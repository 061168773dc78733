"""Who reaches a cluster: loopback ports, CurveZMQ on ours, private files; a model's names are text alone."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import ipyparallel
import pytest
import zmq

import ddp_lab
from tests.cluster.conftest import Lab
from tests.security.looking import everything_in, listening, process_ids, run_folder
from tests.security.markup import NAME, assert_text_alone
from tests.waiting import wait_until

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_nothing_of_ours_listens_on_a_port(lab: Lab) -> None:
    """Of all processes only ranks listen on ports: TCPStore's and Gloo's, at most three, on loopback."""
    ports = {name: listening(pid) for pid, name in process_ids(lab).items()}
    assert {"client", "controller", "child of controller", "rank 0", "rank 1"} <= ports.keys()
    assert {name for name, found in ports.items() if found} <= {"rank 0", "rank 1"}
    assert [len(ports[rank]) for rank in ("rank 0", "rank 1")] == [2, 1]
    assert {address for of_process in ports.values() for address in of_process.values()} <= LOOPBACK


def test_ipyparallel_without_the_key_is_refused(lab: Lab, tmp_path: Path) -> None:
    """ipyparallel's client connects with the connection file, and not with one that lacks the key or has another."""
    (file,) = run_folder(lab).rglob("ipcontroller-client.json")
    connection = json.loads(file.read_text())
    given = ipyparallel.Client(connection, profile_dir=str(tmp_path), timeout=10)
    try:
        wait_until(lambda: given.ids, "the engines are known")
    finally:
        given.close(linger=0)
    keyless = {name: value for name, value in connection.items() if "curve" not in name}
    for changed in (keyless, {**connection, "curve_serverkey": zmq.curve_keypair()[0].decode()}):
        with pytest.raises((TimeoutError, OSError, ipyparallel.error.TimeoutError)):
            ipyparallel.Client(changed, profile_dir=str(tmp_path), timeout=0.5)
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_no_key_in_arguments_or_variables(lab: Lab) -> None:
    """No key is in a process's arguments, which every user may read, or in its variables."""
    keys = {value for name, value in lab.wire.endpoint().items() if "secret" in name or "public" in name}
    for file in (*run_folder(lab).rglob("ipcontroller-*.json"), *run_folder(lab).rglob("keys.json")):
        keys |= {value for name, value in json.loads(file.read_text()).items() if "key" in name and value}
    assert len(keys) >= 5
    for pid, process in process_ids(lab).items():
        for place in ("cmdline", "environ"):
            said = Path(f"/proc/{pid}/{place}").read_bytes()
            assert not [key for key in keys if key.encode() in said], f"{place} of {process}"


def test_files_are_the_users_alone(lab: Lab, tmp_path: Path) -> None:
    """Every file that a cluster makes has mode 0600, every folder 0700. What a cell writes has the modes that it had in
    the user's own shell."""
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in everything_in(run_folder(lab))}
    names = {path.name for path in found}
    assert {"controller.log", "fork_server.log", "rank-0.log", "ipcontroller-engine.json", "keys.json"} <= names
    assert {"control", "data", "c:1"} <= {path.name for path in found if path.is_socket()}
    for path, mode in found.items():
        wanted = 0o700 if path.is_dir() or (path.is_socket() and path.parent.name != "wire") else 0o600
        # IPython copies its own notice, for everybody, into a folder that nobody else may open.
        assert mode == (0o644 if path.name == "README" else wanted), path
    here = tmp_path / "here"
    here.touch()
    lab.run(f"import pathlib; pathlib.Path({str(tmp_path)!r}, f'rank{{rank}}').touch()")
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {here.stat().st_mode}
    assert ddp_lab.current_cluster() is lab


def test_parameters_of_a_real_model(lab: Lab, tmp_path: Path) -> None:
    """A parameter named `<script>…` trains; its name is in the timeline, and text in the report."""
    lab.run(
        f"""
net = torch.nn.Linear(4, 4)
net.register_parameter({NAME!r}, torch.nn.Parameter(torch.ones(4)))
made = type('Net{NAME}', (torch.nn.Module,), {{'forward': lambda self, x: self.net(x) * getattr(self.net, {NAME!r})}})()
made.net = net
evil = ddp_lab.DistributedDataParallel(made)
for _ in range(4):
    evil(torch.ones(2, 4)).sum().backward()
"""
    )
    model = lab.timeline.reducers()[-1]
    assert model.module == f"Net{NAME}"
    names = [one["name"] for one in lab.timeline.assignment(model.reducer)["parameters"]]
    assert f"net.{NAME}" in names
    page = lab.timeline.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert_text_alone(page, f"Net{NAME}", f"net.{NAME}")
