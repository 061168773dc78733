"""A real JupyterLab and a real Chromium to be driven: started with nothing of the user's, ended with nothing left."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
from playwright.sync_api import Browser, Error, Page, sync_playwright

from ddp_lab.dashboard.views import VIEWS
from ddp_lab.errors import DdpLabError
from tests.waiting import DEADLINE_S, wait_until

__all__ = ["PROJECT", "Lab", "NotebookPage", "chromium", "chromium_browser", "jupyterlab", "need_chromium"]
__all__ += ["notebook_alone", "open_tab", "printed"]

PROJECT = Path(__file__).resolve().parents[2]
CHROMIUM_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
CHROMIUM_FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
_SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}


def chromium() -> str | None:
    """Path of Chromium, None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def need_chromium() -> None:
    """Raises DdpLabError if Chromium is not installed."""
    if chromium() is None:
        raise DdpLabError("this benchmark needs Chromium (on Debian: apt-get install chromium)")


def printed(cell: Any) -> Any:
    """What a cell of a saved notebook has printed, as JSON; displays beside it don't count.

    Raises:
        DdpLabError: it has failed.
    """
    (output,) = (one for one in cell.outputs if one.output_type in ("stream", "error"))
    if output.output_type == "error":
        raise DdpLabError(f"a cell of the notebook failed: {output.ename}: {output.evalue}")
    return json.loads(output.text)


def open_tab(page: Page, title: str) -> None:
    """Opens a tab of the dashboard: first its group, if the tabs are in groups."""
    question = next((view.question for view in VIEWS.values() if view.title == title), "")
    for name in filter(None, (question, title)):
        found = page.locator(".ddp-lab .ddp-tab:visible").filter(has_text=re.compile(rf"^{name}( \(\d+\))?$"))
        if found.count():
            found.first.click()


@contextmanager
def jupyterlab(root: Path) -> Iterator[Lab]:
    """Runs a JupyterLab server whose configuration, settings and notebooks live below `root`."""
    token = secrets.token_hex(16)
    environment = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(root / "settings"), "PYTHONWARNINGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    environment.pop("DDP_LAB_EARLY", None)  # as users have it: one zygote for all of its kernels
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    for name in (*folders, "JUPYTERLAB_WORKSPACES_DIR"):
        environment[name] = str(root / name.lower())
    for plugin, settings in _SETTINGS.items():
        file = root / "settings" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    config = root / "jupyter_config_dir" / "labconfig" / "page_config.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"buildAvailable": false, "buildCheck": false}')  # each page would start Node.js to look
    notebooks = root / "notebooks"
    notebooks.mkdir()
    arguments = [
        *("--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", f"--IdentityProvider.token={token}"),
        "--LabApp.expose_app_in_browser=True",
    ]
    with (root / "jupyterlab.log").open("w") as log:
        command = [sys.executable, "-m", "ddp_lab", "lab", str(notebooks), *arguments]
        server = subprocess.Popen(command, env=environment, cwd=notebooks, stdout=log, stderr=log)
        family: list[psutil.Process] = []
        try:
            yield Lab(_address(root, server), token, notebooks)
        finally:
            family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
            server.terminate()
            server.wait()
            _see_gone(family)


def _address(root: Path, server: subprocess.Popen[bytes]) -> str:
    """Waits until the server says where it listens."""

    def found() -> str:
        if server.poll() is not None:
            raise DdpLabError("JupyterLab did not start:\n" + (root / "jupyterlab.log").read_text()[-2_000:])
        for file in (root / "jupyter_runtime_dir").glob(f"jpserver-{server.pid}.json"):
            text = file.read_text()
            return str(json.loads(text)["url"]) if text.endswith("}") else ""
        return ""

    return wait_until(found, "the start of JupyterLab")


def _see_gone(family: list[psutil.Process]) -> None:
    """Waits until these processes have ended; ends those that do not and says so."""
    _, left = psutil.wait_procs(family, timeout=DEADLINE_S)
    names = [f"{one.pid} {one.name()}" for one in left]
    for one in left:
        one.kill()
    if names:
        raise DdpLabError(f"JupyterLab left processes behind: {names}")


class Lab:
    """A running JupyterLab."""

    def __init__(self, url: str, token: str, notebooks: Path) -> None:
        self.url = url
        self.token = token
        self.notebooks = notebooks
        self._number = 0

    def write(self, *cells: str) -> str:
        """Writes a notebook of code cells under a name of its own (one used before restores old widgets)."""
        self._number += 1
        name = f"test{self._number}-{secrets.token_hex(3)}.ipynb"
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(book, self.notebooks / name)
        return name

    def copy(self, notebook: Path) -> str:
        """Copies a notebook into a folder of its own."""
        folder = secrets.token_hex(3)
        (self.notebooks / folder).mkdir()
        shutil.copy(notebook, self.notebooks / folder)
        return f"{folder}/{notebook.name}"

    def read(self, name: str) -> Any:
        """Returns a notebook as it is on disk."""
        return nbformat.read(self.notebooks / name, as_version=4)

    def kernels(self) -> list[dict[str, Any]]:
        """Kernels that run, as the server describes them."""
        request = urllib.request.Request(f"{self.url}api/kernels", headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found


@contextmanager
def chromium_browser() -> Iterator[Browser]:
    """Runs Chromium with a profile of its own; in all its pages Playwright waits as long as tests do."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_FLAGS))
        browser.on("context", lambda context: context.set_default_timeout(1000 * DEADLINE_S))
        try:
            yield browser
        finally:
            browser.close()


class NotebookPage:
    """A notebook open in JupyterLab in Chromium; in a page where JupyterLab is open already it is not loaded again."""

    def __init__(self, page: Page, lab: Lab, name: str) -> None:
        self.page = page
        self.lab = lab
        self.name = name
        self.errors: list[str] = []
        page.on("pageerror", self._note_error)
        if page.url.startswith(lab.url):
            self.command("docmanager:open", {"path": name, "factory": "Notebook"})
            self._wait_for_cells()
        else:
            self._load()

    def _note_error(self, error: Error) -> None:
        """Keeps an error of a widget's script, which is loaded from a blob; others are JupyterLab's own."""
        if "blob:" in (error.stack or ""):
            self.errors.append(str(error))

    def _load(self) -> None:
        """Opens the notebook and waits for its cells."""
        self.page.goto(f"{self.lab.url}doc/tree/{self.name}?token={self.lab.token}")
        self._wait_for_cells()

    def _wait_for_cells(self) -> None:
        self.page.wait_for_function(
            "(name) => { const shown = window.jupyterapp?.shell?.currentWidget;"
            " return shown?.context?.path === name && shown.content?.widgets?.length > 0 }",
            arg=self.name,
        )

    def reload(self) -> None:
        """Opens the notebook anew; its kernel goes on, if it has one."""
        self._load()
        self.wait_for_status("idle")

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Starts a command of JupyterLab."""
        self.page.evaluate(
            "([name, args]) => { window.jupyterapp.commands.execute(name, args ?? {}) }", [name, arguments]
        )

    def start_kernel(self) -> None:
        """Waits for the kernel that JupyterLab starts with the notebook."""
        self.wait_for_status("idle")

    def status(self) -> str:
        """Status of the kernel, "none" without one."""
        return str(
            self.page.evaluate(
                "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session?.kernel?.status ?? 'none'"
            )
        )

    def wait_for_status(self, status: str) -> None:
        """Waits until the kernel's status is `status`."""
        wait_until(lambda: self.status() == status, f"kernel status {status!r}")

    def run_cell(self, index: int, wait: bool = True) -> None:
        """Runs one cell; by default waits until it has ended."""
        self.page.evaluate(
            "(index) => { const { content } = window.jupyterapp.shell.currentWidget; content.activeCellIndex = index;"
            " content.widgets[index].model.executionCount = null;"  # a new kernel may count to the same number again
            " window.jupyterapp.commands.execute('notebook:run-cell') }",
            index,
        )
        if wait:
            wait_until(lambda: self.executions(index) is not None, f"the end of cell {index}")

    def code_cells(self) -> list[int]:
        """Indices of the code cells."""
        cells = self.lab.read(self.name).cells
        return [index for index, cell in enumerate(cells) if cell.cell_type == "code"]

    def executions(self, index: int) -> int | None:
        """Execution count of a cell, None while it runs or has not run."""
        count: int | None = self.page.evaluate(
            "(index) => window.jupyterapp.shell.currentWidget.content.widgets[index].model.executionCount ?? null",
            index,
        )
        return count

    def save(self) -> Any:
        """Saves the notebook and returns it as it is on disk."""
        self.page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.context.save() }")
        return self.lab.read(self.name)

    def set_theme(self, name: str) -> None:
        """Changes the theme, e.g. ``"JupyterLab Dark"``."""
        self.page.evaluate(
            "async (theme) => { await window.jupyterapp.commands.execute('apputils:change-theme', {theme}) }", name
        )
        light = "false" if "Dark" in name else "true"
        self.page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached")

    def shut_down(self) -> None:
        """Ends the notebook's kernel."""
        self.page.evaluate(
            "async () => { await window.jupyterapp.shell.currentWidget.context.sessionContext.shutdown() }"
        )


@contextmanager
def notebook_alone(*cells: str, height: int = 1000) -> Iterator[NotebookPage]:
    """A notebook of these cells in a JupyterLab and a Chromium of its own; in the end its last cell is run.

    Raises:
        DdpLabError: Chromium is missing.
    """
    need_chromium()
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder)) as lab, chromium_browser() as browser:
        page = browser.new_page(viewport={"width": 1360, "height": height})
        notebook = NotebookPage(page, lab, lab.write(*cells))
        notebook.start_kernel()
        try:
            yield notebook
        finally:
            notebook.run_cell(len(cells) - 1)
            notebook.shut_down()
