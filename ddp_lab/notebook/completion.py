"""Tab completion in `%%distributed` cells: names and attributes as they are on a rank.

The rank answers from a thread beside its running cell (`ddp_lab.engine.cells.name_lookup`), or not in time: then the
notebook completes what it knows itself.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from ..errors import ClusterError
from ..formatting import parse_ranks
from ..protocol.entry_points import CLUSTER

__all__ = ["CELL", "PATH", "ask", "first_rank", "load", "unload"]

_SECONDS = 0.3
CELL = re.compile(r"\s*%%distributed\b(?P<options>[^\n]*)\n")
_CLUSTER = re.compile(r"--cluster[ =](?P<name>\S+)")
_RANKS = re.compile(r"--ranks[ =](?P<ranks>\S+)")
# A name with attributes and literal subscripts, up to the cursor.
PATH = re.compile(r"""(?:[^\W\d]\w*(?:\[(?:\d+|'[^'\n]*'|"[^"\n]*")\])*\s*\.\s*)*(?:[^\W\d]\w*)?$""")


def load(shell: Any) -> None:
    """Adds the ranks' names to the completions of an IPython shell."""
    unload(shell)
    shell.Completer.custom_matchers.append(_matcher)


def unload(shell: Any) -> None:
    """Takes them away."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [each for each in matchers if each is not _matcher]


@context_matcher(identifier="ddp_lab.rank_names")  # type: ignore[untyped-decorator, unused-ignore]
def _matcher(context: CompletionContext) -> dict[str, Any]:
    cell = CELL.match(context.full_text)
    path = PATH.search(context.text_until_cursor)
    if cell is None or context.cursor_line < 1 or path is None or not path.group():
        return {"completions": []}
    text = path.group()
    answer = ask(cell["options"], "complete", _SECONDS, text=text) or {}
    found = [(name, kind) for name, kind in answer.get("matches", [])]
    begun = text.rpartition(".")[2].strip()
    completions = [SimpleCompletion(name, type=kind) for name, kind in found]
    # What the notebook knows of a variable of the same name is not what the rank has.
    return {"completions": completions, "matched_fragment": begun, "suppress": bool(found) and "." in text}


def first_rank(options: str) -> int:
    """The first of the ranks that a cell's line names; 0 if it names none."""
    named = _RANKS.search(options)
    try:
        return parse_ranks(named["ranks"])[0] if named is not None else 0
    except ValueError:
        return 0


def ask(options: str, op: str, seconds: float, **request: Any) -> dict[str, Any] | None:
    """What the first of the ranks answers on which a cell with these options would run.

    None if there is no cluster, or no answer in time.
    """
    module = sys.modules.get(CLUSTER)
    clusters = module.running_clusters() if module is not None else []
    named, rank = _CLUSTER.search(options), first_rank(options)
    cluster = next((one for one in clusters if named is None or one.name == named["name"]), None)
    if cluster is None or rank >= cluster.world_size:
        return None
    try:
        answers: dict[int, dict[str, Any]] = cluster.wire.request([rank], op, seconds, **request)
    except ClusterError:  # it is being stopped
        return None
    return answers.get(rank)
