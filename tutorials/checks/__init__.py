"""The functions that a lesson's cells call: `check(1)`, `predict(1)` and `compare(1)`.

`check(1)` says whether the answer to exercise 1 is right and, if not, what is wrong. Each lesson has a module with one
function for each exercise. Its parameters are names that the lesson's cells define, in the notebook, or on the ranks if
`on_ranks` runs it there. It returns the verdict, "Right: …" or "Not yet: …".

`predict(1)` shows the choices of a lesson's first prediction, and `compare(1)` compares the reader's choice with what
the cells in between have shown.
"""

from __future__ import annotations

import html
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import ipywidgets
from IPython import get_ipython
from IPython.display import display

import ddp_lab
from ddp_lab.lesson_files import VERDICT

__all__ = ["Checks", "Prediction", "Predictions", "call_with_names", "on_ranks"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not find these files

_RIGHT, _NOT_YET = "Right", "Not yet"
_RIGHT_BADGE, _WRONG_BADGE = ("✓", "#1a7f37"), ("✗", "#c62828")  # with white words: more than 5:1, whatever the theme
_BADGE = "padding: 1px 8px; border-radius: 3px; font-weight: bold; color: #ffffff; background-color: "


class Checks:
    """The function `check` of a lesson.

    Args:
        exercises: a check for each exercise, in order.
    """

    def __init__(self, *exercises: Callable[..., str]) -> None:
        self._exercises = exercises
        self._solved: set[int] = set()

    def __call__(self, number: int) -> None:
        """Shows whether the exercise is solved, and how many of the lesson are."""
        verdict = call_with_names(self._exercises[number - 1])
        word, _, why = verdict.partition(": ")
        if word == _RIGHT:
            self._solved.add(number)
        else:
            self._solved.discard(number)
        total = f"{len(self._solved)} of {len(self._exercises)} exercises solved"
        data = {"exercise": number, "right": word == _RIGHT, "why": why}
        _show(word == _RIGHT, word, why, total, {VERDICT: data})


@dataclass(frozen=True)
class Prediction:
    """What a reader predicts before a cell runs.

    Args:
        choices: the possible outcomes.
        outcome: returns the choice that came true. Its parameters are names that the lesson's cells define.
        on_ranks: run `outcome` on all ranks, and take what rank 0 says; else run it in the notebook.
    """

    choices: Sequence[str]
    outcome: Callable[..., str]
    on_ranks: bool = False

    def came_true(self) -> str:
        """The choice that came true; else what is missing, as "Not yet: …"."""
        if self.on_ranks:
            return str(ddp_lab.current_cluster().run(call_with_names, self.outcome).values[0])
        return call_with_names(self.outcome)


class Predictions:
    """The predictions of a lesson: `predict = predictions.predict`, `compare = predictions.compare`."""

    def __init__(self, *predictions: Prediction) -> None:
        self._predictions = predictions
        self._chosen: dict[int, str] = {}
        self._compared: dict[int, bool] = {}

    def predict(self, number: int, choice: str | None = None) -> None:
        """Shows the choices as buttons.

        Args:
            number: of the prediction, from 1.
            choice: predicts this, where buttons cannot be shown.

        Raises:
            ValueError: `choice` is not one of the choices.
        """
        choices = self._predictions[number - 1].choices
        if choice is not None:
            if choice not in choices:
                raise ValueError(f"{choice!r} is not a choice: predict one of {', '.join(map(repr, choices))}")
            self._chosen[number] = choice
        buttons = ipywidgets.RadioButtons(
            options=choices, value=self._chosen.get(number), layout={"width": "max-content"}
        )
        buttons.observe(lambda change: self._chosen.update({number: change["new"]}), "value")
        display(buttons)

    def compare(self, number: int) -> None:
        """Shows what came true beside what the reader predicted."""
        came_true = self._predictions[number - 1].came_true()
        word, _, why = came_true.partition(": ")
        if word == _NOT_YET:
            _show(False, word, why)
            return
        chosen = self._chosen.get(number)
        if chosen is None:
            print(f"What happened: {came_true}. You made no prediction: choose one above before you run the cell.")
            return
        self._compared[number] = chosen == came_true
        total = f"{sum(self._compared.values())} of {len(self._predictions)} predictions came true"
        if chosen == came_true:
            _show(True, "As you predicted", f"{came_true}.", total)
        else:
            _show(False, "Not as you predicted", f"{came_true}. You predicted: {chosen}.", total)


def on_ranks(check: Callable[..., str], ranks: Iterable[int] | None = None, timeout: float = 60.0) -> Callable[[], str]:
    """A check that runs on ranks; of what they say, the first "Not yet" counts.

    Args:
        check: its parameters are names of a rank.
        ranks: where; None for all.
        timeout: seconds after which the ranks are interrupted; the exercise is not solved then.
    """

    def run() -> str:
        try:
            said = ddp_lab.current_cluster().run(call_with_names, check, ranks=ranks, timeout=timeout).values
        except ddp_lab.CellError as error:
            if next(iter(error.failures.values())).name not in ("KeyboardInterrupt", "Timeout"):
                raise
            return f"Not yet: the check did not end within {timeout:g} s. Do all ranks call the same collectives?"
        rank = next((rank for rank, verdict in said.items() if verdict.startswith(_NOT_YET)), min(said))
        return said[rank] if len(set(said.values())) == 1 else f"{said[rank]} (This is what rank {rank} found.)"

    return run


def _show(right: bool, word: str, why: str, total: str = "", forms: Mapping[str, object] | None = None) -> None:
    """Displays a badge, an explanation, what has been reached in the lesson, and further forms by MIME type."""
    mark, colour = _RIGHT_BADGE if right else _WRONG_BADGE
    badge = f"{mark} {word}:"
    lines = [line for line in (html.escape(why).replace("\n", "<br>"), total) if line]
    shown = f'<p><span style="{_BADGE}{colour}">{badge}</span>&ensp;{"<br>".join(lines)}</p>'
    plain = f"{badge} {why}" + (f"\n{total}" if total else "")
    display({"text/plain": plain, "text/html": shown, **(forms or {})}, raw=True)


def call_with_names(function: Callable[..., Any]) -> Any:
    """What a function returns, given the variables that its parameters name: the notebook's, or a rank's."""
    names = get_ipython().user_ns
    wanted = list(inspect.signature(function).parameters)
    missing = [name for name in wanted if name not in names]
    if missing:
        return f"Not yet: there is no {missing[0]} yet. Run the cells above first."
    return function(**{name: names[name] for name in wanted})
