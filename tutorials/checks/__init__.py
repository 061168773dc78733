"""`check(1)` in a lesson: whether the answer to exercise 1 is right and, if not, what is wrong.

Each lesson has a module with one function for each exercise. Its parameters are names that the lesson's cells define,
in the notebook, or on the ranks if `on_ranks` runs it there. It returns the verdict, "Right: …" or "Not yet: …".
"""

from __future__ import annotations

import html
import inspect
import sys
from collections.abc import Callable, Iterable

import cloudpickle
from IPython import get_ipython
from IPython.display import display

import ddp_lab

__all__ = ["Checks", "on_ranks"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not find these files

_RIGHT, _NOT_YET = "Right", "Not yet"
_MARKS = {_RIGHT: "✓", _NOT_YET: "✗"}
_COLOURS = {_RIGHT: "#1a7f37", _NOT_YET: "#c62828"}  # with white words: more than 5:1, whatever the theme
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
        verdict = _called(self._exercises[number - 1])
        word, _, why = verdict.partition(": ")
        if word == _RIGHT:
            self._solved.add(number)
        else:
            self._solved.discard(number)
        badge = f"{_MARKS[word]} {word}:"
        solved = f"{len(self._solved)} of {len(self._exercises)} exercises solved"
        told = html.escape(why).replace("\n", "<br>")
        shown = f'<p><span style="{_BADGE}{_COLOURS[word]}">{badge}</span>&ensp;{told}<br>{solved}</p>'
        display({"text/plain": f"{badge} {why}\n{solved}", "text/html": shown}, raw=True)


def on_ranks(
    check: Callable[..., str], ranks: Iterable[int] | None = None, timeout: float | None = None
) -> Callable[[], str]:
    """A check that runs on ranks; of what they say, the first "Not yet" counts.

    Args:
        check: its parameters are names of a rank.
        ranks: where; None for all.
        timeout: seconds after which the ranks are interrupted.
    """

    def run() -> str:
        said = ddp_lab.current_cluster().run(_called, check, ranks=ranks, timeout=timeout).values
        rank = next((rank for rank, verdict in said.items() if verdict.startswith(_NOT_YET)), min(said))
        return said[rank] if len(set(said.values())) == 1 else f"{said[rank]} (This is what rank {rank} found.)"

    return run


def _called(check: Callable[..., str]) -> str:
    """What a check says, with the names of this process: the notebook's, or a rank's."""
    names = get_ipython().user_ns
    wanted = list(inspect.signature(check).parameters)
    missing = [name for name in wanted if name not in names]
    if missing:
        return f"Not yet: there is no {missing[0]} yet. Run the cells above first."
    return check(**{name: names[name] for name in wanted})
