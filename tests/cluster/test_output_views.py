"""The switch between the views of cells' outputs, in a real kernel, and a page that asks for output by rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.cluster.hanging import held
from tests.cluster.pages import Notebook, beside, notebook_with_cluster
from tests.waiting import DEADLINE_S, wait_until

REPLACES_PROCESSES = True


class WidgetPage:
    """The part of a page that runs the widget's script: it asks for outputs, and takes what the widget sends."""

    def __init__(self, manager: KernelManager) -> None:
        self._client = beside(manager)
        self._comm, self._subshell = "", self._new_subshell()
        self.state: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []  # of cells, by their names

    def close(self) -> None:
        """Leaves the kernel."""
        self._client.stop_channels()

    def _new_subshell(self) -> str:
        """Of JupyterLab's for widgets: their messages arrive while the main thread runs a cell."""
        self._client.control_channel.send(self._client.session.msg("create_subshell_request"))
        return str(self._client.get_control_msg(timeout=DEADLINE_S)["content"]["subshell_id"])

    def until(self, condition: Callable[[], Any]) -> Any:
        """Takes messages until the condition holds."""

        def taken() -> Any:
            while not (found := condition()) and self._client.iopub_channel.msg_ready():
                message = self._client.get_iopub_msg(timeout=0)
                self._take(message["msg_type"], message["content"])
            return found

        return wait_until(taken, lambda: f"what is waited for, in {(self.state.keys(), self.messages)}")

    def _take(self, kind: str, content: Mapping[str, Any]) -> None:
        data = content.get("data", {})
        self.places += re.findall(r'<ddp-lab-output.* data-cell="(\w+)"', data.get("text/html", ""))
        if kind == "comm_open" and "views" in data.get("state", {}):
            self._comm, self.state = content["comm_id"], dict(data["state"])
        elif kind == "comm_msg" and content["comm_id"] == self._comm:
            if data["method"] == "custom":
                self.messages.append(data["content"])
            elif data["method"] == "update":
                self.state.update(data["state"])

    def ask(self, cell: str) -> dict[str, Any]:
        """The answer to a question for a cell's output."""
        known = len(self.messages)
        self._send({"method": "custom", "content": {"cell": cell}})
        return self.until(lambda: next((one for one in self.messages[known:] if one["cell"] == cell), None))

    def choose(self, cell: str, view: str) -> None:
        """As the switch does."""
        self.state.update(views={**self.state["views"], cell: view}, view=view)
        state = {"views": self.state["views"], "view": view}
        self._send({"method": "update", "state": state, "buffer_paths": []})

    def _send(self, data: Mapping[str, Any]) -> None:
        self.until(lambda: self._comm)
        message = self._client.session.msg("comm_msg", {"comm_id": self._comm, "data": data})
        message["header"]["subshell_id"] = self._subshell
        self._client.shell_channel.send(message)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """A kernel with a cluster of two ranks."""
    with notebook_with_cluster() as (kernel, _):
        yield kernel


@pytest.fixture(scope="module")
def page(notebook: Notebook) -> Iterator[WidgetPage]:
    """A page that is open from the beginning."""
    page = WidgetPage(notebook.manager)
    yield page
    page.close()


def place(shown: Any) -> dict[str, str]:
    """The attributes of the cell's one place."""
    [element] = shown.switches
    return dict(re.findall(r'data-(\w+)="([\w-]+)"', element))


def test_cells_without_output_by_several_ranks_get_nothing(notebook: Notebook, page: WidgetPage) -> None:
    """No output, output of one rank, of none: no switch; and no widget's libraries are loaded."""
    for cell in ("x = 1", "if rank == 1: print(rank)"):
        assert notebook.run(f"%%distributed\n{cell}").switches == []
    for options in ("--ranks 1", "--quiet"):
        assert notebook.run(f"%%distributed {options}\nprint(rank)").switches == []
    assert notebook.run("import sys; 'ipywidgets' in sys.modules").text == "False"


def test_a_page_asks_for_output_by_rank(notebook: Notebook, page: WidgetPage) -> None:
    """The place names kernel and cell; a page that asks gets what each rank said, the merged output is as ever."""
    shown = notebook.run("%%distributed\nprint('same')\nif rank == 1: print('own')")
    assert shown.text == "ranks 0–1 │ same\n   rank 1 │ own"
    found = place(shown)
    assert found["view"] == "merged"
    page.until(lambda: page.state.get("token"))  # it listens
    assert page.state["token"] == found["kernel"]
    answer = page.ask(found["cell"])
    texts = {rank: [one["data"]["text/plain"] for one in blocks.values()] for rank, blocks in answer["blocks"].items()}
    assert texts == {"0": ["same"], "1": ["same\nown"]}
    assert (answer["groups"], answer["ended"], answer["states"]) == ([[0], [1]], True, {})
    assert page.ask("unknown") == {"cell": "unknown", "kept": False}


def test_the_choice_is_remembered(notebook: Notebook, page: WidgetPage) -> None:
    """What a page chooses holds for the next cells; `--view` for one cell; `%cluster view` shows and sets it."""
    first = place(notebook.run("%%distributed\nprint(rank)"))
    page.choose(first["cell"], "tabs")
    page.ask(first["cell"])  # the kernel takes a page's messages in order
    assert "cells show the ranks' output in tabs" in notebook.run("%cluster view").text
    assert place(notebook.run("%%distributed\nprint(rank)"))["view"] == "tabs"
    assert place(notebook.run("%%distributed --view merged\nprint(rank)"))["view"] == "merged"
    assert place(notebook.run("%%distributed\nprint(rank)"))["view"] == "tabs"
    assert "cells show the ranks' output side by side" in notebook.run("%cluster view side-by-side").text
    page.until(lambda: page.state["view"] == "side-by-side")
    notebook.run("%cluster view merged")
    assert "UsageError: %cluster view: argument view: invalid choice" in notebook.run("%cluster view columns").text


def test_a_running_cell_can_be_seen_by_rank(notebook: Notebook, page: WidgetPage, tmp_path: Path) -> None:
    """Its output arrives while it runs and holds the kernel's main thread, and at the end how it ended."""
    gate = tmp_path / "gate"
    page.ask("unknown")  # what earlier cells sent has been taken
    page.places.clear()
    request = notebook.begin(f"%%distributed\nprint('first', rank)\n{held(gate)}\nprint('last', rank)")
    [found] = page.until(lambda: page.places)
    answer = page.ask(found)
    assert not answer["ended"]
    assert answer["blocks"]["1"]["0"]["data"] == {"text/plain": "first 1"}
    gate.touch()
    notebook.finish(request)
    end = page.until(lambda: next((one for one in page.messages if one["cell"] == found and one["ended"]), None))
    assert end["blocks"]["1"]["0"]["data"] == {"text/plain": "first 1\nlast 1"}


def test_each_rank_has_its_error(notebook: Notebook, page: WidgetPage) -> None:
    """The rank that failed first is told from the one that waited for it; so is one whose process exited."""
    shown = notebook.run("%%distributed\nprint(rank)\nif rank == 1: raise ValueError('end of data')\ndist.barrier()")
    answer = page.ask(place(shown)["cell"])
    assert answer["states"] == {"0": "unblocked", "1": "failed"}
    assert "ValueError: end of data" in answer["blocks"]["1"]["1"]["data"]["text/plain"]
    assert "dist.barrier()" in answer["blocks"]["0"]["1"]["data"]["text/plain"]
    shown = notebook.run(
        "%%distributed\nprint(rank, flush=True)\ndist.barrier()\nif rank == 1: import os; os._exit(3)\ndist.barrier()"
    )
    answer = page.ask(place(shown)["cell"])
    assert answer["states"]["1"] == "failed"
    assert "RankLost: ended with exit code 3" in str(answer["blocks"]["1"])
