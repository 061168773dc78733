"""One JupyterLab and one Chromium for each module of browser tests; skipped in one line where a piece is missing.

Not for the whole session: Playwright keeps an event loop open in the main thread, which other libraries notice.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from ddp_lab.bench.browser import Lab

_MODULES = {"playwright": "playwright", "jupyterlab": "jupyterlab", "nbformat": "nbformat", "psutil": "psutil"}


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
        if "browser" not in item.path.parts:
            continue
        item.add_marker(pytest.mark.browser)
        item.add_marker(pytest.mark.timeout(300))
        if missing and os.environ.get("CI") != "true":
            item.add_marker(pytest.mark.skip(reason=f"missing: {missing}"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, with a fresh profile."""
    missing = _missing()
    if missing:
        pytest.fail(f"the browser tests need {missing}")
    from ddp_lab.bench.browser import chromium_browser

    with chromium_browser() as started:
        yield started


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on an empty folder."""
    from ddp_lab.bench.browser import jupyterlab

    with jupyterlab(tmp_path_factory.mktemp("jupyterlab")) as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page of 1360 by 1000 pixels with cookies of its own."""
    context = browser.new_context(viewport={"width": 1360, "height": 1000}, device_scale_factor=1.5)
    try:
        yield context.new_page()
    finally:
        context.close()
