"""What if: the recorded and the predicted step side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...analysis.step_parts import SPANS
from ...timeline.timeline import Timeline
from ..paint.palette import PHASES, TITLES
from ..paint.scene_json import blocks_json
from ..scene import Axis, Bars, Panel, Scene, Table
from .view import View

__all__ = ["WhatIf", "what_if_blocks", "what_if_scene"]

_ROWS = {"recorded": "recorded", "same": "simulated as recorded", "predicted": "what if"}


class WhatIf(View):
    """Predictions; its facts are those of `controls.what_if.WhatIfStage.snapshot`."""

    name = "what_if"
    title = "What if"
    about = "Sliders for world size, link, bucket size limit and straggler; the predicted step beside the recorded one."
    question = "Try it"
    steps = model = False
    fed = True
    also = ()
    pixels = None

    def scene(self, facts: Mapping[str, Any]) -> Scene:
        return what_if_scene(facts)

    def words(self, timeline: Timeline, facts: Mapping[str, Any]) -> str:
        return what_if_words(facts)


def what_if_scene(answer: Mapping[str, Any]) -> Scene:
    """Returns the recorded and the predicted step side by side, by phase, from `WhatIfStage.snapshot`."""
    title = what_if_words(answer)
    if answer["state"] != "ready":
        return Scene("What if", empty=title.rstrip("."))
    rows = {title: answer[key] for key, title in _ROWS.items()}
    lane, last = np.arange(len(rows)), [f"{one['step']:.2f} ms" for one in rows.values()]
    bars = [
        Bars(
            name,
            key,
            lane,
            np.array([one[key] for one in rows.values()]),
            last if key == "exposed" else (),
            about=TITLES[key],
        )
        for key, (_, name) in PHASES.items()
        if key not in SPANS  # a simulated step has them in `other`
    ]
    keys = {key: name for key, (_, name) in PHASES.items() if key not in SPANS} | {"step": "step"}
    table = [
        [name, *(one[key] for one in rows.values()), answer["predicted"][key] - answer["same"][key]]
        for key, name in keys.items()
    ]
    return Scene(
        title,
        (Panel(Axis("ms (median)", unit="ms"), Axis("", list(rows)), bars, total="step"),),
        Table(["phase", *rows, "change"], table, "Milliseconds by phase", folded=True),
    )


def what_if_blocks(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the picture and the table of a prediction for a page."""
    scene = what_if_scene(answer)
    return blocks_json([scene, *([scene.table] if scene.table is not None else [])])


def what_if_words(answer: Mapping[str, Any]) -> str:
    """Returns the answer in one sentence."""
    if answer["state"] != "ready":
        return str(answer["text"])
    recorded, predicted = answer["recorded"]["step"], answer["predicted"]["step"]
    return f"What if: recorded step {recorded:.2f} ms, predicted {predicted:.2f} ms ({answer['world']} ranks)"
