"""The sliders' view as a picture that stays without a browser: recorded and predicted step, by phase."""

from __future__ import annotations

from typing import Any

import numpy as np

from .paint import charts
from .paint.charts import Series
from .paint.palette import PHASES
from .paint.svg import empty_svg

__all__ = ["picture", "words"]

_ROWS = (("recorded", "recorded"), ("same", "simulated"), ("predicted", "what if"))


def picture(answer: dict[str, Any]) -> str:
    """Returns what the sliders' view shows (`WhatIfStage.snapshot`) as SVG."""
    from .pictures import framed

    if answer["state"] != "ready":
        return empty_svg(answer["text"])
    series = [Series(name, key, np.array([answer[row][key] for row, _ in _ROWS])) for key, (_, name) in PHASES.items()]
    notes = [f"{answer[row]['step']:.2f} ms" for row, _ in _ROWS]
    title = words(answer)
    return framed(charts.rows([name for _, name in _ROWS], series, notes, title), title, series)


def words(answer: dict[str, Any]) -> str:
    """One sentence."""
    if answer["state"] != "ready":
        return str(answer["text"])
    recorded, predicted = answer["recorded"]["step"], answer["predicted"]["step"]
    return f"What if: recorded step {recorded:.2f} ms, predicted {predicted:.2f} ms ({answer['world']} ranks)"
