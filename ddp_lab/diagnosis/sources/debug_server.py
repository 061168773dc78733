"""A job with torch's debug server (`torch.distributed.debug.start_debug_server`, from torch 2.13 on), over HTTP.

Its pages show, for each rank, what the rank's own server answered: stacks of its threads, and its Flight Recorders. If
the script called `ddp_lab.serve_doctor` there is a page of ours, which says everything that we know in a cell.
"""

from __future__ import annotations

import html
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from ...errors import DdpLabError
from ..dumps import Dump, flights_by_rank
from ..snapshot import Place, RankSnapshot
from ..stacks import place, snapshot_of_stack

__all__ = ["DebugServer"]

PAGE = "/doctor.json"
_ANSWER_S = 70.0  # torch's page waits for a silent rank for 60 s
_RANK = re.compile(r"<h\d>Rank (\d+): [^<]*</h\d>\s*(<p>Failed[^<]*</p>)?\s*<pre>(.*?)</pre>", re.DOTALL)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_NO_PAGE = 404
# page -> the backend whose collectives it has; before torch 2.15 the second shows Gloo's once more
_RECORDERS = {"/fr_trace_json": "gloo", "/fr_trace_json?backend=nccl2": "nccl2", "/fr_trace_nccl_json": "nccl"}


class DebugServer:
    """The debug server of a job.

    Args:
        address: ``HOST:PORT``.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def snapshots(self) -> list[RankSnapshot]:
        """What each rank does now.

        Raises:
            DdpLabError: the server does not answer, or is another one.
        """
        try:
            found = self._examined()
        except (ValueError, KeyError, TypeError) as error:
            raise DdpLabError(f"{self._address} answers, but not as torch's debug server does: {error!r}") from error
        if not found:
            raise DdpLabError(f"{self._address} is not torch's debug server: it has no page /stacks that shows ranks")
        return found

    def _examined(self) -> list[RankSnapshot]:
        ours = self._page(PAGE)
        if ours is not None:
            return [RankSnapshot.of_script(one) for one in json.loads(ours)["ranks"]]
        stacks = self._page("/stacks") or ""
        return _examined(_by_rank(stacks), [self._recorders(*each) for each in _RECORDERS.items()])

    def _recorders(self, page: str, backend: str) -> dict[int, Mapping[str, Any]]:
        """Rank -> the dump of its recorder of this backend."""
        dumps = {rank: json.loads(text) for rank, text in _by_rank(self._page(page) or "").items() if text}
        for dump in dumps.values():
            own = (one for one in dump.get("entries") or () if one["profiling_name"].startswith(f"{backend}:"))
            dump["entries"] = list(own)
        return dumps

    def _page(self, path: str) -> str | None:
        """A page; None if the server has none of this name."""
        try:
            with urllib.request.urlopen(f"http://{self._address}{path}", timeout=_ANSWER_S) as answer:
                return str(answer.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            if error.code == _NO_PAGE or path != "/stacks":
                return None
            raise DdpLabError(f"{self._address} answered {error.code} ({error.reason}) for {path}") from error
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise DdpLabError(
                f"no debug server answers at {self._address}: {why}; the script must call "
                "`torch.distributed.debug.start_debug_server(port)`, or `ddp_lab.serve_doctor(port)`, on all ranks"
            ) from error


def _by_rank(page: str) -> dict[int, str]:
    """Rank -> what it answered; "" if it did not."""
    return {int(rank): "" if failed else html.unescape(text) for rank, failed, text in _RANK.findall(page)}


def _examined(stacks: Mapping[int, str], recorders: list[dict[int, Mapping[str, Any]]]) -> list[RankSnapshot]:
    now = time.time_ns()
    dumps = [Dump(rank, tuple(one[rank] for one in recorders if rank in one), now) for rank in sorted(stacks)]
    flights = flights_by_rank(dumps)
    found = []
    for rank, text in sorted(stacks.items()):
        if not text:
            found.append(RankSnapshot(rank, "silent", runs="script"))
        else:
            found.append(snapshot_of_stack(rank, _main_thread(text), flights[rank]))
    return found


def _main_thread(text: str) -> list[Place]:
    """The frames of the thread that was started first, which is listed last; the innermost first."""
    last = text.rpartition("hread 0x")[2]
    return [place(file, int(line), function) for file, line, function in _FRAME.findall(last)]
