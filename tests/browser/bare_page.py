"""A dashboard in a bare page of Chromium: its script, its style and a model that passes messages to the real widget."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page
from playwright.sync_api import TimeoutError as NotThere

from ddp_lab.dashboard import bundle
from ddp_lab.dashboard.dashboard import Dashboard
from ddp_lab.dashboard.live_widget import LiveWidget
from ddp_lab.dashboard.views import VIEWS
from ddp_lab.timeline.timeline import Timeline
from tests.benchmarks.browser import open_tab
from tests.waiting import DEADLINE_S, wait_until

_TRAITS = (*LiveWidget.class_own_traits(sync=True), *Dashboard.class_own_traits(sync=True))
_PUMP_MS = 1000  # not a deadline: how long a probe may look for a node before the next messages are passed on
_BOOT = """async ({source, style, traits, theme, kernel}) => {
  document.head.insertAdjacentHTML("beforeend", `<style>${style} body { margin: 8px } ${theme}</style>`);
  const listeners = new Map();
  const emit = (name, ...args) => { for (const one of listeners.get(name) ?? []) one(...args) };
  window.model = {
    data: traits,
    get(name) { return this.data[name] },
    set(name, value) {
      this.data[name] = value;
      emit("change");
    },
    on(name, f) { listeners.set(name, (listeners.get(name) ?? new Set()).add(f)) },
    off(name, f) { listeners.get(name)?.delete(f) },
    widget_manager: {kernel},
    sent: [],
    said: [],
    send(content) { this.said.push(content); this.sent.push(window.toKernel(content)) },
  };
  window.emit = emit;
  window.fromKernel = (changed, messages) => {
    Object.assign(window.model.data, changed);
    if (Object.keys(changed).length) emit("change");
    for (const [content, bodies] of messages) {
      const view = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
      emit("msg:custom", content, bodies.map(view));
    }
  };
  const widget = (await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})))).default();
  widget.initialize({model: window.model});
  window.unmount = widget.render({model: window.model, el: document.body});
}"""
DARK = """:root {
  --jp-ui-font-color1: #e4e4e4; --jp-ui-font-color2: #a8a8a8; --jp-layout-color1: #111; --jp-layout-color2: #242424;
  --jp-border-color1: #616161; --jp-border-color2: #3a3a3a; --jp-brand-color1: #64b5f6;
} body { background: #111 }"""


class _Recorded(Dashboard):
    """Keeps what it sends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.sent: list[tuple[dict[str, Any], Any]] = []
        self.facts_sent: list[str] = []  # the views, in the order in which their facts were sent
        super().__init__(*args, **options)

    def send(self, content: Any, buffers: Any = None) -> None:
        self.sent.append((content, buffers))
        if content["type"] == "facts":
            self.facts_sent.append(content["view"])


class BarePage:
    """A page that shows a dashboard of a timeline; `kernel`: what it knows of its kernel, as JupyterLab's pages do."""

    def __init__(
        self, page: Page, timeline: Timeline, *, theme: str = "", kernel: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.dashboard = _Recorded(timeline, **options)
        self._told: dict[str, Any] = {}
        self._asked: list[dict[str, Any]] = []
        page.expose_function("toKernel", lambda message: self._asked.append(message))
        source = {
            "source": bundle.module_text("app/dashboard.js"),
            "style": bundle.style_text("dashboard"),
            "theme": theme,
            "kernel": kernel,
        }
        page.evaluate(_BOOT, {**source, "traits": self._changed()})

    def pump(self) -> None:
        """Passes on what page and kernel have for each other."""
        self.page.evaluate("() => Promise.all(window.model.sent.splice(0))")
        while self._asked:
            self.dashboard._receive(self.dashboard, self._asked.pop(0), [])
        self.dashboard._tick()
        sent = [self.dashboard.sent.pop(0) for _ in range(len(self.dashboard.sent))]
        messages = [[content, [base64.b64encode(body).decode() for body in buffers or ()]] for content, buffers in sent]
        self.page.evaluate("([changed, messages]) => window.fromKernel(changed, messages)", [self._changed(), messages])

    def until(self, probe: Callable[[], Any], what: str | Callable[[], str]) -> Any:
        """Pumps until `probe` returns something true; a node that it asks for may come with any pump."""

        def pumped() -> Any:
            self.pump()
            try:
                return probe()
            except NotThere:
                return None

        self.page.set_default_timeout(_PUMP_MS)
        try:
            return wait_until(pumped, what)
        finally:
            self.page.set_default_timeout(1000 * DEADLINE_S)

    def open(self, tab: str) -> None:
        """Opens a tab, as a reader does."""
        open_tab(self.page, tab)
        self.pump()

    def titles(self) -> list[str]:
        """The titles of all tabs."""
        return [VIEWS[names[0]].title for names in self.dashboard.tabs]

    def first_row(self, table: str) -> list[str]:
        """The texts of the cells in the first row of a table, as soon as it has one."""
        cells = self.page.locator(f"{table} tbody tr").first.locator("th, td")
        return self.until(cells.all_inner_texts, f"a row in {table}")

    def says(self, selector: str, words: str) -> str:
        """What the first such node says, as soon as these words are in it."""
        node = self.page.locator(selector).first

        def said() -> str:
            texts.append(node.inner_text())
            return texts[-1] if words in texts[-1] else ""

        texts: list[str] = []
        return self.until(said, lambda: f"{words!r} in {selector}; it says {texts[-1:]}")

    def close(self) -> None:
        """Ends the dashboard; fails if the page's script had an error."""
        self.dashboard.close()
        if self.dashboard.layout is not None:
            self.dashboard.layout.close()
        assert self.errors == [], self.errors

    def _changed(self) -> dict[str, Any]:
        """Traits that the page has not been told."""
        found = {}
        for name in _TRAITS:
            if name == "facts" and name in self._told:
                continue  # after the first, each view's come in a message
            value = getattr(self.dashboard, name)
            if name == "kept":
                value = {}
            if name not in self._told or self._told[name] != value:
                found[name] = self._told[name] = value
        return found


@contextmanager
def bare_page(
    browser: Browser, timeline: Timeline, *, width: int = 1240, height: int = 900, clock: bool = False,
    kind: type[BarePage] = BarePage, **options: Any,
) -> Iterator[Any]:  # fmt: skip
    """A dashboard in a page of its own size; `clock`: the page's time passes only when the test lets it."""
    context = browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    if clock:
        page.clock.install()
    made = kind(page, timeline, **options)
    try:
        yield made
    finally:
        made.close()
        context.close()
