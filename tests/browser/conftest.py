"""One JupyterLab and one Chromium for this folder's tests; skipped in one line where a piece is missing.

Not for the whole session: Playwright keeps an event loop open in the main thread, which other libraries notice.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

    from tests.benchmarks.browser import Lab, NotebookPage

_MODULES = {"playwright": "playwright", "jupyterlab": "jupyterlab", "nbformat": "nbformat", "psutil": "psutil"}
_SIZE = {"width": 1360, "height": 1000}
# Ends what is open in JupyterLab without a question; whether the page is then as it was before.
_CLEAR = """() => {
  for (const widget of [...window.jupyterapp.shell.widgets('main')]) widget.dispose();
  return !document.querySelector('.jp-Dialog') && document.body.dataset.jpThemeLight === 'true'
    && innerWidth === 1360 && innerHeight === 1000;
}"""


def _missing() -> str | None:
    """What the browser tests need and is not there."""
    for module, package in _MODULES.items():
        if importlib.util.find_spec(module) is None:
            return f"the Python package {package} (pip install 'ddp_lab[test,notebooks]')"
    if not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        return "Chromium (on Debian: apt-get install chromium)"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips them where something is missing (with CI=true they fail)."""
    missing = _missing()
    for item in items:
        if not _is_here(item):
            continue
        item.add_marker(pytest.mark.browser)
        if missing and os.environ.get("CI") != "true":
            item.add_marker(pytest.mark.skip(reason=f"missing: {missing}"))


def _is_here(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents


class Shared:
    """What the tests of this folder share: each part is started when it is asked for, and anew once a test broke it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._lab: Lab | None = None
        self._browser: Browser | None = None
        self._context: BrowserContext | None = None
        self._free: Page | None = None
        self._lab_ends, self._browser_ends = ExitStack(), ExitStack()

    def lab(self) -> Lab:
        """A JupyterLab that answers and runs no kernel."""
        from tests.benchmarks.browser import jupyterlab

        if self._lab is None:
            self._lab = self._lab_ends.enter_context(jupyterlab(self._factory.mktemp("jupyterlab")))
        return self._lab

    def browser(self) -> Browser:
        """A Chromium that runs."""
        missing = _missing()
        if missing:
            pytest.fail(f"the browser tests need {missing}")
        from tests.benchmarks.browser import chromium_browser

        if self._browser is not None and not self._browser.is_connected():
            self.end_browser()
        if self._browser is None:
            self._browser = self._browser_ends.enter_context(chromium_browser())
        return self._browser

    @contextmanager
    def page(self) -> Iterator[Page]:
        """A page in which JupyterLab is open and shows nothing, or an empty one: loading it costs several seconds."""
        page, self._free = self._free, None
        if page is None or page.is_closed():
            browser = self.browser()
            if self._context is None:
                self._context = browser.new_context(viewport=_SIZE)
            page = self._context.new_page()
        try:
            yield page
        finally:
            self._take_back(page)

    @contextmanager
    def notebook(self, *cells: str, run: int = 0) -> Iterator[NotebookPage]:
        """A notebook of these cells, the first of which have run; its kernel ends with it, and no script has failed."""
        from tests.benchmarks.browser import NotebookPage

        with self.page() as page:
            opened = NotebookPage(page, self.lab(), self.lab().write(*cells))
            opened.start_kernel()
            try:
                for cell in range(run):
                    opened.run_cell(cell)
                yield opened
            finally:
                opened.shut_down()
            assert not opened.errors

    def _take_back(self, page: Page) -> None:
        """Keeps a page that is as good as new."""
        from playwright.sync_api import Error

        try:
            clean = page.evaluate(_CLEAR)
        except Error:  # it was closed, or never showed JupyterLab
            clean = False
        if clean and self._free is None:
            self._free = page
        else:
            page.close()

    def end_lab(self) -> None:
        """Ends JupyterLab, and the page that shows it."""
        if self._free is not None:
            self._free.close()
        self._lab = self._free = None
        self._lab_ends.close()

    def end_browser(self) -> None:
        """Ends Chromium with all its pages."""
        self._browser = self._context = self._free = None
        self._browser_ends.close()

    def end(self) -> None:
        """Ends everything."""
        try:
            self.end_browser()
        finally:
            self.end_lab()


_SHARED = pytest.StashKey[Shared]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Ends what is shared before a test of another folder."""
    try:
        return (yield)
    finally:
        if nextitem is not None and not _is_here(nextitem) and _SHARED in item.session.stash:
            item.session.stash[_SHARED].end()


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """JupyterLab, Chromium and a page, not started yet."""
    shared = request.session.stash[_SHARED] = Shared(tmp_path_factory)
    yield shared
    shared.end()


@pytest.fixture
def nothing_shared(shared: Shared) -> None:
    """Ends what is shared, for a test that starts a Chromium itself: Playwright runs once in a thread."""
    shared.end()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for which a cell waits."""
    return tmp_path_factory.mktemp("gate") / "gate"


@pytest.fixture(scope="module")
def browser(shared: Shared) -> Browser:
    """Chromium."""
    return shared.browser()


@pytest.fixture(scope="module")
def lab(shared: Shared) -> Iterator[Lab]:
    """JupyterLab; a module that leaves a kernel running there fails, and the next one gets another JupyterLab."""
    started, left = shared.lab(), None
    yield started
    try:
        left = started.kernels()
        assert left == [], "kernels are left running"
    finally:
        if left != []:
            shared.end_lab()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page of 1360 by 1000 pixels with cookies of its own."""
    context = browser.new_context(viewport=_SIZE, device_scale_factor=1.5)
    try:
        yield context.new_page()
    finally:
        context.close()


@pytest.fixture(scope="module")
def blank(browser: Browser) -> Iterator[Page]:
    """An empty page for scripts alone."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def bare(browser: Browser) -> Iterator[Callable[..., Any]]:
    """Opens dashboards in pages of their own, which are closed after the test: see `bare_page`."""
    from tests.browser.bare_page import bare_page

    with ExitStack() as pages:
        yield lambda timeline, **options: pages.enter_context(bare_page(browser, timeline, **options))


@pytest.fixture
def lab_page(shared: Shared, lab: Lab) -> Iterator[Page]:
    """A page of 1360 by 1000 pixels for a notebook, in which JupyterLab may be open already."""
    with shared.page() as page:
        yield page
