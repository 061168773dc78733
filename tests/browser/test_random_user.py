"""A user who does one thing after the other without plan: after each, the page says what the cluster knows.

`DDP_LAB_SOAK_SEED=n` chooses the user, `DDP_LAB_ACTIONS=n` how much they do; a picture of each 25th moment is kept in
the folder `DDP_LAB_PICTURES`, if it is given.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator

from tests.benchmarks.browser import Lab, NotebookPage, printed
from tests.browser.conftest import Shared
from tests.waiting import wait_until

SEED = int(os.environ.get("DDP_LAB_SOAK_SEED", "0")) or int(time.time())
ACTIONS = int(os.environ.get("DDP_LAB_ACTIONS", "500"))
PICTURES = os.environ.get("DDP_LAB_PICTURES", "")

# Cells of the notebook, by the action that they are.
_BEGIN = "%load_ext ddp_lab\nimport ddp_lab, json, os, signal\nother = globals().get('other')\n"
CELLS = {
    "start": _BEGIN + "%cluster start -n 2 --backend gloo --name user\nlab = ddp_lab.current_cluster()",
    "start kept": _BEGIN + "if other is not None:\n    other.stop(); other = None\n"
    "%cluster start -n 2 --backend gloo --detach --name {kept}\nlab = ddp_lab.current_cluster()",
    "panel": "lab",
    "dashboard": "lab.dashboard('timeline', 'sync')",
    "second": "lab.dashboard('findings', 'stragglers', 'buckets', 'timeline')",
    "saved": "ddp_lab.Timeline.load(lab.timeline.save('saved.npz')).dashboard()",
    "model": "%%distributed\nmodel = ddp_lab.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), "
    "torch.nn.Linear(64, 64)), bucket_cap_mb=0.01)",
    "train": "%%distributed\nfor _ in range(20): model(torch.randn(4, 64)).sum().backward()",
    "background": "%%distributed --no-wait --name bg\nimport time\nfor _ in range(1000):\n"
    "    time.sleep(0.01); dist.all_reduce(torch.ones(1))",
    "trains": "%%distributed --no-wait --name bg\nimport time\nfor _ in range(500):\n"
    "    time.sleep(0.01); model(torch.randn(4, 64)).sum().backward()",
    "short": "%%distributed --no-wait --name bg\nprint('short')",
    "fails": "%%distributed --no-wait --name bg\nif rank == 1: raise ValueError('end of data')\ndist.barrier()",
    "error": "%%distributed\nif rank == 0: 1 / 0\ndist.barrier()",
    "interrupt": "%cluster interrupt",
    "rejoin": "%cluster rejoin",
    "kill": "os.kill(lab.pids()['rank 1'], signal.SIGKILL)",
    "restart": "lab.restart()",
    "stop": "%cluster stop",
    "leave": "%cluster detach",
    "reconfigure": "lab.reconfigure(bucket_cap_mb=0.02, timeout=3)",
    "inject": "lab.inject(ddp_lab.faults.SlowRank(1, 0.002))",
    "heal": "lab.clear_faults()",
    "other": "if other is None:\n    other = ddp_lab.Cluster(1, backend='gloo', name='other').start()\n    lab.use()\n"
    "else:\n    other.stop(); other = None",
}
FACTS = """
run = lab.results["bg"] if "bg" in lab.results else None
print(json.dumps({
    "running": lab.running,
    "name": lab.name,
    "left": not lab.running and lab.name in [one.name for one in ddp_lab.Cluster.detached()],
    "other": other is not None,
    "states": [one.word for one in lab.status()] if lab.running else [],
    "events": [[one.step if one.events else -1, one.events] for one in lab.timeline.ranks()],
    "background": None if run is None else run.headline,
    "ended": run is None or run.done,
}))
"""
OFTEN = {"background": 3, "trains": 2, "short": 2, "fails": 2, "train": 3, "interrupt": 3, "model": 3}
BACKGROUND = ("background", "trains", "short", "fails")
# What a cell may fail with: it has nothing to act on, or a rank still runs the cell of a client before this one.
FAILS = {
    **dict.fromkeys(BACKGROUND, ("CellRun", "ClusterError")),
    "model": ("CellError", "ClusterError"),
    "train": ("CellError", "ClusterError"),
    "error": ("CellError", "ClusterError"),
    "rejoin": ("ClusterError",),
    "kill": ("KeyError", "ProcessLookupError"),
    "leave": ("ClusterError",),
    "reconfigure": ("ClusterError",),
    "inject": ("ClusterError",),
}

# At the end: nothing is left of the user, nor of a cluster that outlived the notebook.
END = """
import ddp_lab, os
while ddp_lab.current_cluster() is not None:
    ddp_lab.current_cluster().stop()
for one in ddp_lab.Cluster.detached():
    ddp_lab.Cluster.attach(one.name).stop()
"""
# What a view says of a cluster that has stopped.
PAST = ("was stopped", "The cluster is not running", "no longer uses", "was restarted")


class User:
    """Does one thing after the other, and looks whether what the page says is so.

    Attributes:
        alive: whether `lab` is a cluster that runs.
        said: number of the action, its name and what its cell failed with, for each action.
    """

    def __init__(self, notebook: NotebookPage) -> None:
        self.notebook = notebook
        self.alive = False
        self.said: list[str] = []
        self._dice = random.Random(SEED)
        self._background = ""  # the cell whose line is that of the last cell in the background
        self._restarted = False  # whether the kernel is another one than what is shown came from
        self._saved = False  # whether a timeline that was saved is shown
        self._known: dict[str, Any] = {}  # the last facts
        names = [name for name in CELLS if name not in ("panel", "start kept")]
        self._actions = [name for name in (*names, "reload", "kernel") for _ in range(OFTEN.get(name, 1))]

    def act(self, name: str = "") -> None:
        """Does this, or the next thing that comes to mind, and looks until the page is true."""
        begun = time.monotonic()
        name = name or self._dice.choice(self._actions)
        if not self.alive and name != "reload":
            # A cell would start a cluster by itself, and `lab` would be the one that was stopped.
            name = self._dice.choice(("start", "start kept")) if self.said else "start"
        failed = self._do(name)
        if name in BACKGROUND and not failed.startswith("ClusterError"):
            self._background = name
        self._saved = self._saved or name == "saved"
        self.said.append(f"{len(self.said)} {name} {failed}".strip())
        self._settle()
        print(f"{self.said[-1]} ({time.monotonic() - begun:.1f} s)", flush=True)
        assert not self.notebook.errors, self.said[-6:]

    def _do(self, name: str) -> str:
        """Does it; returns what its cell failed with."""
        notebook = self.notebook
        if name == "reload":
            notebook.save()
            notebook.reload()
            if self._restarted:  # no kernel knows what is shown: it is what was saved
                self._restarted, self._saved, self._known = False, False, {}
            elif self._known and not self._is_live():
                notebook.reload()
                assert self._is_live(), "the live views did not come back after a second load"
            return ""
        if name == "kernel":
            notebook.page.evaluate(
                "async () => { await window.jupyterapp.shell.currentWidget.context.sessionContext.restartKernel() }"
            )
            notebook.wait_for_status("idle")
            self.alive, self._restarted = False, True
            return ""
        notebook.run_cell(list(CELLS).index(name))
        failed = _failed(notebook, name)
        if failed and failed.partition(":")[0] not in FAILS.get(name, ()):
            pytest.fail(f"{name} failed after {', '.join(self.said[-6:])}: {failed}")
        if name.startswith("start"):
            self._saved = self._saved and not self._restarted
            self.alive, self._restarted, self._background = True, False, ""
            for shown in ("panel", "dashboard", "second", *(["model"] if self._dice.random() < 0.8 else [])):
                self._do(shown)
        return failed

    def _is_live(self) -> bool:
        """Whether the live views have come back after a reload; else the page shows the pictures that were saved.

        JupyterLab gives them up for good if it draws the notebook before it has found the kernel: as on a machine with
        much more to do than it can. Then a user loads the page again.
        """
        views = [self._cell("panel").locator(".ddp-cluster")]
        views += [self._cell(name).locator(".ddp-ranks") for name in ("dashboard", "second")]
        try:
            return wait_until(lambda: all(one.count() for one in views), "live views")
        except AssertionError:
            print("the live views did not come back: loaded again", flush=True)
            return False

    def _settle(self) -> None:
        """Waits until the page says what is so: it follows within moments."""
        try:
            wait_until(lambda: not self._false(), "a true page")
        except AssertionError:
            picture(self.notebook, "false")
            pytest.fail(f"after {', '.join(self.said[-6:])}: {self._false()}")

    def _false(self) -> str:
        """What the page says that is not so; "" if all of it is so."""
        if self._restarted:
            return self._false_after_restart()
        if not self.alive and not self._known:
            return ""
        facts = self._known = self._facts()
        self.alive = facts["running"]
        return (
            self._false_panel(facts) or self._false_dashboards(facts) or self._false_saved() or self._false_line(facts)
        )

    def _facts(self) -> dict[str, Any]:
        self.notebook.run_cell(len(CELLS))
        found: dict[str, Any] = printed(self.notebook.save().cells[len(CELLS)])
        return found

    def _cell(self, name: str) -> Locator:
        return self.notebook.page.locator(".jp-CodeCell").nth(list(CELLS).index(name))

    def _false_after_restart(self) -> str:
        for name in ("panel", "dashboard", "second"):
            said = _seen(self._cell(name).locator(".ddp-life"))
            if "was restarted" not in said:
                return f"the kernel was restarted; {name} says {said!r}"
        states = {row[1] for row in _rows(self._cell("saved").locator(".ddp-ranks"))} if self._saved else set()
        if states & {"idle", "running", "unknown"}:
            return f"the kernel was restarted; of a saved timeline: {states}"
        if not self._background or self._known["background"] is None:
            return ""
        said = _seen(self._cell(self._background).locator(".ddp-background"))
        told = self._known["background"] in said
        if not self._known["ended"]:  # nor may it have done so since
            told = "connection lost" in said or any(sign in said for sign in "✓✗■–")
        return "" if told else f"before the kernel was restarted: {self._known}; the line says {said!r}"

    def _false_panel(self, facts: dict[str, Any]) -> str:
        text = _seen(self._cell("panel").locator(".ddp-cluster"))
        if any(words in text for words in PAST) == facts["running"]:
            return f"running: {facts['running']}; the panel says {text!r}"
        if ("no longer uses" in text) != facts["left"]:
            return f"left: {facts['left']}; the panel says {text!r}"
        if facts["running"] and facts["name"] not in text:
            return f"it is {facts['name']}; the panel says {text!r}"
        for state in set(facts["states"]):
            wanted = f"{facts['states'].count(state)} {state}"
            if wanted not in text:
                return f"{wanted}; the panel says {text!r}"
        return ""

    def _false_dashboards(self, facts: dict[str, Any]) -> str:
        for name in ("dashboard", "second"):
            cell = self._cell(name)
            said = _seen(cell.locator(".ddp-life"))
            wanted = (
                "no longer uses" if facts["left"] else "another one is running" if facts["other"] else "was stopped"
            )
            if any(words in said for words in PAST) == facts["running"] or (
                not facts["running"] and wanted not in said
            ):
                return f"running: {facts['running']}, {wanted}; {name} says {said!r}"
        rows = _rows(self._cell("dashboard").locator(".ddp-ranks"))
        if facts["running"] and "running" not in facts["states"] and rows:
            for state, (step, events), said in zip(facts["states"], facts["events"], rows, strict=False):
                row = [state, str(step) if step >= 0 else "–", f"{events:,}"]
                if [said[1], said[2], said[4]] != row:
                    return f"rank {said[0]} is {row}; its row says {said}"
        return ""

    def _false_saved(self) -> str:
        cell = self._cell("saved")
        if not self._saved:
            return ""
        said = _seen(cell.locator(".ddp-life"))
        states = [row[1] for row in _rows(cell.locator(".ddp-ranks"))]
        return f"of a saved timeline: {said!r}, {states}" if said or {"idle", "running"} & {*states} else ""

    def _false_line(self, facts: dict[str, Any]) -> str:
        if not self._background or facts["background"] is None:
            return ""
        said = _seen(self._cell(self._background).locator(".ddp-background"))
        words, found = (re.sub(r"[\d.]+ (?:s|min)\b", "", one) for one in (facts["background"], said))
        if words.strip() in found:
            return ""
        return f"the cell {self._background}: {facts['background']!r}; its line says {said!r}"


def _seen(node: Locator) -> str:
    """What a reader sees there who scrolls to it: what is out of view is not kept up to date."""
    if not node.count():
        return ""
    node.locator("..").scroll_into_view_if_needed()
    return node.inner_text() if node.is_visible() else ""


def _rows(table: Locator) -> list[list[str]]:
    """The texts of a table's rows."""
    _seen(table)
    found: list[list[str]] = table.evaluate(
        "(node) => [...node.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return found


def _failed(notebook: NotebookPage, name: str) -> str:
    """What the cell failed with; "" if it did not."""
    return str(
        notebook.page.evaluate(
            "(index) => { const outputs = window.jupyterapp.shell.currentWidget.content.widgets[index].model.toJSON()"
            ".outputs; const error = outputs.find((one) => one.output_type === 'error');"
            " return error ? `${error.ename}: ${error.evalue}` : '' }",
            list(CELLS).index(name),
        )
    )


def picture(notebook: NotebookPage, name: str) -> None:
    """Keeps a picture of the whole notebook in light and dark, if pictures are asked for."""
    if not PICTURES:
        return
    size = notebook.page.viewport_size
    notebook.page.set_viewport_size({**size, "height": 4 * size["height"]})
    for theme in ("Dark", "Light"):
        notebook.set_theme(f"JupyterLab {theme}")
        _seen(notebook.page.locator(".jp-CodeCell").nth(0))
        notebook.page.screenshot(path=Path(PICTURES) / f"{SEED}-{name}-{theme.lower()}.png")
    notebook.page.set_viewport_size(size)


@pytest.fixture
def notebook(shared: Shared, lab: Lab) -> Iterator[NotebookPage]:
    """A notebook whose kernel runs nothing yet, and in the end nothing any more."""
    kept = f"kept-{secrets.token_hex(3)}"
    cells = [cell.replace("{kept}", kept) for cell in CELLS.values()]
    with shared.page() as page:
        opened = NotebookPage(page, lab, lab.write(*cells, FACTS, END))
        opened.start_kernel()
        yield opened
        opened.run_cell(len(CELLS) + 1)
        assert not opened.save().cells[len(CELLS) + 1].outputs
        opened.shut_down()


@pytest.mark.soak
def test_what_a_random_user_sees_is_so(notebook: NotebookPage) -> None:
    """After each action panel, dashboards and the line of the last cell in the background agree with the cluster."""
    print(f"seed {SEED}: DDP_LAB_SOAK_SEED={SEED} repeats it")
    user = User(notebook)
    user.act("start")
    for number in range(ACTIONS):
        user.act()
        if number % 25 == 24:
            picture(notebook, str(number + 1))
