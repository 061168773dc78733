"""Names that would be markup, and what is found of them in pages: real tags, or text."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import numpy as np

from ddp_lab.protocol.events import DTYPE, Batch, Kind
from ddp_lab.timeline.timeline import Timeline
from tests.training_events import Training

FLAG = "ddpLabBroken"
NAME = f"<script>{FLAG}=1</script>"
NAMES = (NAME, f"<img src=x onerror={FLAG}=1>", f"'\"><svg onload={FLAG}=1>", "<b>&amp;</b>")
TEXT = " ".join(NAMES)
# A page of ours has other tags, none of these, and no attribute that would run anything.
FORBIDDEN = {"script", "iframe", "object", "embed", "link", "a", "base", "form"}


def training() -> Timeline:
    """Steps of a model whose class, parameters, hook and marks have such names; rank 1 is late in bucket 1."""
    made, steps = Timeline(), Training(2, 3, forward_ms=1.0, delays={(1, 1): 4.0})
    described: dict[str, Any] = steps.assignment()
    described["module"] = f"Net{NAME}"
    described["options"] = {"comm_hook": NAME, "find_unused_parameters": True, NAME: TEXT}
    for one in described["parameters"]:
        one["name"] = f"{NAMES[one['index'] % 4]}.weight{one['index']}"
    steps.assignment = lambda: described  # type: ignore[method-assign]
    for step in range(20):
        begin = 10**12 + step * 20 * 10**6
        steps.feed(made, step, begin)
        if step == 0:
            made.describe(0, {"type": "mark", "index": 0, "name": NAME, "session": 1})
        mark = np.zeros(1, DTYPE)
        mark["sequence"], steps._sequence[0] = steps._sequence[0], steps._sequence[0] + 1
        mark["host_ns"], mark["kind"] = begin + 14 * 10**6, Kind.MARK
        mark["reducer"] = mark["step"] = mark["bucket"] = -1
        made.extend(Batch(0, 1, int(mark["sequence"][0]), 0, mark))
    return made


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.words += " ".join(value or "" for _, value in attrs)

    def handle_data(self, data: str) -> None:
        self.words += data


def assert_text_alone(page: str, *wanted: str) -> None:
    """Fails if a page has a tag or an attribute that came from a name, or does not show these texts."""
    parser = _Tags()
    parser.feed(page)
    parser.close()
    assert not FORBIDDEN & {*parser.tags}
    assert parser.handlers == []
    for text in wanted:
        assert text in parser.words
