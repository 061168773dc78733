"""Every view of the dashboard in every state of a cluster; `make looks` keeps a picture of each."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.bare_page import DARK, BarePage
from tests.browser.looks import STATES, Stage, State

# What a page must not say: a value that is not there, and words for the authors alone.
_NEVER = ("undefined", "NaN", "[object", "null", "Infinity", "could not draw", "stopped updating")
_CONTROLS = """() => [...document.querySelectorAll('[data-asks=ranks]')].filter(
  (one) => [...one.querySelectorAll('button')].some((button) => button.checkVisibility())).map((one) => one.disabled)"""
_TITLES = """() => [...document.querySelectorAll('[data-asks]:disabled :is(button, input, select)')].filter(
  (one) => one.checkVisibility()).map((one) => one.title)"""
_DARKEN = """(theme) => {
  document.head.insertAdjacentHTML("beforeend", `<style>${theme}</style>`);
  document.body.classList.add("dark");
}"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two ranks that go from state to state, in the order of the tests."""
    made = Stage(tmp_path_factory.mktemp("looks"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def pictures() -> Iterator[dict[str, dict[str, list[str]]]]:
    """state -> tab -> files below DDP_LAB_LOOKS, which become one page at the end."""
    taken: dict[str, dict[str, list[str]]] = {}
    yield taken
    if "DDP_LAB_LOOKS" in os.environ:
        (Path(os.environ["DDP_LAB_LOOKS"]) / "index.html").write_text(_page(taken))


@pytest.mark.soak
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_each_view_in_each_state(
    state: State, stage: Stage, bare: Callable[..., BarePage], pictures: dict[str, dict[str, list[str]]]
) -> None:
    """The words of every view are those of the state, nothing internal is among them, controls can be used exactly
    where somebody is left to ask, and the others say why not."""
    state.prepare(stage)
    timeline, options = state.shown(stage)
    shown = bare(timeline, width=1280, height=800, **options)
    shown.until(lambda: shown.page.locator(".ddp-lab").inner_text(), "a dashboard")
    if state.script:
        shown.until(lambda: shown.page.locator(".ddp-ranks tbody tr").count(), "the ranks")
        shown.dashboard.snapshot()  # as at the end of each cell
        shown.until(lambda: "stragglers" in shown.dashboard.facts, "the views that are kept")
        shown.page.evaluate(state.script)
    _look(shown, state, pictures.setdefault(state.name, {}))


def _look(shown: BarePage, state: State, taken: dict[str, list[str]]) -> None:
    page, line = shown.page, shown.page.locator(".ddp-life")
    if state.line:
        shown.until(lambda: line.inner_text().startswith(state.line), f"{state.line!r}")
    titles = shown.titles()
    for theme in ("light", "dark"):
        for title in titles:
            shown.open(title)
            text = shown.says(".ddp-lab", state.words.get(title, ""))
            assert not [word for word in _NEVER if word in text]
            assert line.is_visible() == bool(state.line)
            if state.enabled is not None:
                shown.until(lambda: set(page.evaluate(_CONTROLS)) <= {not state.enabled}, "the controls")
                reasons = set(page.evaluate(_TITLES))
                assert all(state.line.startswith(one.rstrip(".")) for one in reasons), reasons
            _take(shown, f"{state.name} {title} {theme}".replace(" ", "-"), taken.setdefault(title, []))
        page.evaluate(_DARKEN, DARK)


def _take(shown: BarePage, name: str, taken: list[str]) -> None:
    """Takes a picture, if pictures are asked for."""
    if "DDP_LAB_LOOKS" not in os.environ:
        return
    for _ in range(3):
        shown.pump()
    folder = Path(os.environ["DDP_LAB_LOOKS"])
    folder.mkdir(parents=True, exist_ok=True)
    shown.page.locator(".ddp-lab").screenshot(path=folder / f"{name}.png")
    taken.append(f"{name}.png")


def _page(taken: dict[str, dict[str, list[str]]]) -> str:
    """All pictures: a row for each state, its tabs side by side, light above dark."""
    body = []
    for state, tabs in taken.items():
        cells = "".join(
            f"<td><b>{html.escape(tab)}</b>"
            + "".join(f"<a href='{name}'><img loading='lazy' src='{name}'></a>" for name in names)
            + "</td>"
            for tab, names in tabs.items()
        )
        body.append(f"<h2>{html.escape(state)}</h2><table><tr>{cells}</tr></table>")
    style = "body{font-family:sans-serif}td{vertical-align:top}img{display:block;width:420px;margin:4px}"
    return f"<!doctype html><meta charset='utf-8'><title>Looks</title><style>{style}</style>{''.join(body)}"
