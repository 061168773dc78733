"""Assistants read a cluster over the Model Context Protocol, and run cells only where both sides allow it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

import ddp_lab
from ddp_lab import CellError, ClusterError
from ddp_lab.assistants import rendezvous
from tests.assistants import Assistant, assistant, data_of, text_of
from tests.cluster.conftest import Lab
from tests.cluster.hanging import HANGS, MODEL, running
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.usefixtures("entries")
READING = {"cluster_status", "doctor", "timeline_summary", "findings", "what_if", "report"}
TRAIN = MODEL + "for _ in range(30):\n    model.zero_grad(); model(x).sum().backward()"


@pytest.fixture(scope="module")
def reader(entries: Path) -> Iterator[Assistant]:
    """An assistant that may only read."""
    with assistant() as one:
        yield one


@pytest.fixture(scope="module")
def runner(entries: Path) -> Iterator[Assistant]:
    """An assistant that may run cells, if the notebook allows it."""
    with assistant("--allow-run") as one:
        yield one


@pytest.fixture
def served(lab: Lab) -> Iterator[None]:
    """The notebook serves assistants that read."""
    with ddp_lab.serve_mcp():
        yield


@pytest.fixture
def allowed(lab: Lab, runner: Assistant) -> Iterator[Assistant]:
    """An assistant that may run cells, also for the notebook."""
    with ddp_lab.serve_mcp(allow_run=True):
        yield runner


def test_without_a_notebook(reader: Assistant) -> None:
    """Tools are listed before a notebook serves: those that read, and say so, each described with its results. A call
    says what to do, and once one serves, it is answered."""
    tools = reader.tools()
    assert set(tools) == READING
    assert all(tool.annotations is not None and tool.annotations.read_only_hint for tool in tools.values())
    assert all(tool.description and tool.output_schema for tool in tools.values())
    alone = reader.call("doctor")
    assert alone.is_error
    assert text_of(alone).startswith("no notebook serves assistants: run `%cluster mcp` in the notebook")


@pytest.mark.usefixtures("served")
def test_status(lab: Lab, reader: Assistant) -> None:
    """cluster_status has each rank with its state and process, as text and as data."""

    def all_answer() -> Any:
        told = reader.call("cluster_status")
        return None if "silent" in text_of(told) else told

    result = wait_until(all_answer, "the ranks' answers")
    assert data_of(result)["cluster"] == lab.name
    ranks = data_of(result)["ranks"]
    assert [(one["rank"], one["state"], one["pid"]) for one in ranks] == [
        (record.rank, "idle", record.pid) for record in lab.status()
    ]
    assert all(str(one["pid"]) in text_of(result) for one in ranks)


@pytest.mark.usefixtures("served")
def test_a_training_is_read(lab: Lab, reader: Assistant) -> None:
    """Summary, findings, a prediction and the report of a training on the ranks; the ranks run nothing for it. A wrong
    argument and a model that there is not are named."""
    lab.run(TRAIN)
    wait_until(lambda: lab.timeline.analysis_input() is not None, "steps")
    summary = reader.call("timeline_summary")
    assert (data_of(summary)["module"], data_of(summary)["step_ms"] > 0) == ("Heads", True)
    assert "per step (median)" in text_of(summary)
    assert reader.call("findings").structured_content is not None
    predicted = data_of(reader.call("what_if", bucket_cap_mb=25, world_size=8))
    assert (predicted["world_size"], predicted["buckets"]) == (8, 1)
    page = Path(text_of(reader.call("report")).removeprefix("The report is "))
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert page.parent.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(page.parent)
    assert lab.link is None
    wrong, unknown = reader.call("what_if", world_size=1), reader.call("timeline_summary", model=99)
    assert (wrong.is_error, unknown.is_error) == (True, True)
    assert text_of(wrong) == "world_size: Input should be greater than or equal to 2"
    assert text_of(unknown).startswith("model=99: there is")


@pytest.mark.usefixtures("served")
def test_a_hang_is_explained_while_the_notebook_waits(lab: Lab, reader: Assistant) -> None:
    """While the main thread waits for a cell that hangs, doctor names the cause and status the cell."""
    code, kind, words = HANGS["sleep"]
    found: dict[str, Any] = {}

    def ask() -> None:
        def explained() -> bool:
            found["hang"] = reader.call("doctor")
            return bool((found["hang"].structured_content or {}).get("kind") == kind)

        try:
            wait_until(explained, "a diagnosis")
            found["status"] = reader.call("cluster_status")
        finally:
            lab.interrupt()

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(CellError):
        lab.run(code, label="%%distributed [3]")
    thread.join()
    said = text_of(found["hang"])
    assert all(word in said for word in words)
    assert data_of(found["hang"])["stuck"]
    assert data_of(found["status"])["pending_cells"] == ["%%distributed [3]"]
    assert {one["state"] for one in data_of(found["status"])["ranks"]} == {"running"}


@pytest.mark.usefixtures("served")
def test_a_cell_is_refused_unless_both_allow_it(lab: Lab, reader: Assistant, runner: Assistant) -> None:
    """An assistant can't run a cell if the notebook did not allow it, or `ddp-lab mcp` did not."""
    lab.run("untouched = True")
    here = reader.call("run_cell", code="untouched = False")
    there = runner.call("run_cell", code="untouched = False")
    assert (here.is_error, there.is_error) == (True, True)
    assert text_of(here).endswith("start the server with `ddp-lab mcp --allow-run`")
    assert text_of(there).endswith("run `%cluster mcp --allow-run` in the notebook")
    assert lab.values("untouched") == {0: True, 1: True}


def test_a_cell_runs_and_is_shown(lab: Lab, allowed: Assistant, capsys: pytest.CaptureFixture[str]) -> None:
    """Where both allow it, the cell runs on the ranks; outputs and values come back, and the user sees it all."""
    assert set(allowed.tools()) == READING | {"run_cell"}
    result = allowed.call("run_cell", code="print('seen by', rank)\nmine = rank + 1")
    again = allowed.call("run_cell", code="mine * 10", ranks=[1])
    assert [one["output"] for one in data_of(result)["ranks"]] == ["seen by 0\n", "seen by 1\n"]
    assert [(one["rank"], one["value"]) for one in data_of(again)["ranks"]] == [(1, "20")]
    shown = capsys.readouterr().out
    assert "An assistant runs assistant [1] on ranks 0–1" in shown
    assert "mine = rank + 1" in shown
    assert "An assistant ran assistant [2] on rank 1: ✓" in shown


def test_a_cell_that_fails(lab: Lab, allowed: Assistant, capsys: pytest.CaptureFixture[str]) -> None:
    """The assistant gets the error of each rank, the user sees it, and the ranks work afterwards."""
    result = allowed.call("run_cell", code="assert rank == 0, 'not rank 0'")
    ranks = data_of(result)["ranks"]
    assert (data_of(result)["state"], ranks[0]["error"]) == ("failed", "")
    assert "AssertionError: not rank 0" in ranks[1]["error"]
    assert "AssertionError: not rank 0" in capsys.readouterr().out
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_cell_is_refused_while_another_runs(lab: Lab, allowed: Assistant) -> None:
    """While the user's cell runs, an assistant's is refused, with the name of that cell."""
    with running(lab, HANGS["sleep"][0]):
        refused = allowed.call("run_cell", code="1")
    assert refused.is_error
    assert text_of(refused) == "ranks 0–1 run %%distributed [3]: wait until it ends"


def test_a_time_limit(lab: Lab, allowed: Assistant) -> None:
    """A cell that does not end is interrupted after its time limit."""
    result = allowed.call("run_cell", code="import time\nwhile True: time.sleep(0.01)", timeout_s=0.5)
    assert data_of(result)["state"] == "failed"
    assert "0.5 s" in text_of(result)


def test_stopping_interrupts_the_assistants_cell(lab: Lab, runner: Assistant) -> None:
    """A server that is stopped ends the cell that an assistant runs; then nothing of the server is left."""
    server = ddp_lab.serve_mcp(allow_run=True)
    folder = Path(rendezvous.find().socket).parent
    found: list[Any] = []
    code = "import time\nwhile True: time.sleep(0.01)"
    thread = threading.Thread(target=lambda: found.append(runner.call("run_cell", code=code)))
    thread.start()
    wait_until(lab.busy_ranks, "the cell")
    server.stop()
    thread.join()
    assert found[0].is_error
    wait_until(lambda: not lab.busy_ranks(), "the cell's end")
    assert not server.serving
    assert not folder.exists()
    with pytest.raises(ClusterError, match="run `%cluster mcp` in the notebook"):
        rendezvous.find()
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_a_second_server_replaces_the_first(lab: Lab) -> None:
    """A process serves once: a new server ends the former one."""
    first = ddp_lab.serve_mcp()
    with ddp_lab.serve_mcp(allow_run=True) as second:
        assert (first.serving, second.serving) == (False, True)
        assert rendezvous.find().pid == os.getpid()


def test_in_a_kernel(entries: Path, tmp_path: Path, reader: Assistant, runner: Assistant) -> None:
    """In a notebook, an assistant's cell is shown below the cell that allowed it. After the cluster's end its timeline
    is still read, and the remedy named. A kernel that ends leaves nothing."""
    manager = KernelManager(transport="ipc", connection_file=str(tmp_path / "kernel.json"))
    manager.start_kernel(env={**os.environ, "PYTHONPATH": os.getcwd()})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE_S)
        for code in ("%load_ext ddp_lab\n%cluster start -n 2", "%cluster mcp --allow-run"):
            reply = client.execute_interactive(code, timeout=DEADLINE_S, output_hook=lambda message: None)
            assert reply["content"]["status"] == "ok"
        allowing = reply["parent_header"]["msg_id"]
        invitation = rendezvous.find()
        client.execute_interactive("1", timeout=DEADLINE_S)
        result = runner.call("run_cell", code="print('seen by', rank)")
        assert not result.is_error, text_of(result)
        shown = []
        while not any("An assistant ran assistant [1] on ranks 0–1: ✓" in text for text in shown):
            message = client.get_iopub_msg(timeout=DEADLINE_S)
            if message["msg_type"] in ("display_data", "update_display_data"):
                assert message["parent_header"]["msg_id"] == allowing
                shown.append(message["content"]["data"].get("text/plain", ""))
        assert any("seen by 1" in text for text in shown)
        client.execute_interactive(f"%%distributed\n{TRAIN}", timeout=DEADLINE_S, output_hook=lambda message: None)
        client.execute_interactive("%cluster stop", timeout=DEADLINE_S, output_hook=lambda message: None)
        assert "Heads on 2 ranks" in text_of(reader.call("timeline_summary"))
        assert "start it with `%cluster start`" in text_of(reader.call("doctor"))
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert not Path(invitation.socket).parent.exists()
    assert not list((entries / "mcp").iterdir())
