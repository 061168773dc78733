"""The doctor in torch's debug server, for any script: a page that says why the ranks make no progress.

Torch starts a server in each rank, whose threads answer while the main thread hangs, and in a process beside rank 0 one
whose pages show what all of them answer. We add a handler to the former and pages to the latter.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist

from ...errors import DdpLabError
from ...protocol.messages import FindCallSite, plain
from ..mismatch import with_places
from ..report import HangReport
from ..snapshot import RankSnapshot
from . import examine
from .script import ScriptRank

__all__ = ["serve_doctor"]

_PORT = 25999  # torch's default
_EXAMINE, _ENTERED_AT = "ddp_lab_examine", "ddp_lab_entered_at"
_FOUND = 200
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}Doctor{% endblock %}</h1>{% endblock %}
{% block content %}
<style>
  nav { flex-wrap: wrap } nav h1 { margin: 0 16px 0 0 }
  table { border-collapse: collapse } td, th { padding: 4px 12px 4px 0; text-align: left; vertical-align: top }
  @media (prefers-color-scheme: dark) { body { background: #16181b; color: #e3e5e8 } a { color: #8ab4f8 } }
</style>
{{ report | safe }}
<p><a href="/doctor">Look again</a></p>
{% endblock %}
"""


def serve_doctor(port: int = _PORT, **options: Any) -> None:
    """Starts torch's debug server with the doctor in it. Call it on all ranks, after `init_process_group`.

    On the host of rank 0, ``http://localhost:PORT/doctor`` then says which rank waits where and for whom, also while
    the ranks hang; ``ddp-lab doctor HOST:PORT`` says it in a terminal. The other pages are torch's own. Its server has
    no password and listens on all addresses: use it only in networks that you trust.

    Args:
        port: of the pages, on the host of rank 0.
        options: those of `torch.distributed.debug.start_debug_server`; ``handlers`` are shown besides ours.

    Raises:
        DdpLabError: torch is older than 2.12, the ranks were not started by torchrun, or a package is missing that
            torch's server needs.
    """
    start = _start_debug_server()
    if not dist.is_initialized():
        raise DdpLabError("there is no process group yet: call init_process_group before ddp_lab.serve_doctor")
    from torch._C._distributed_c10d import _register_handler  # type: ignore[attr-defined, unused-ignore]

    script = ScriptRank()

    def answer(request: Any, response: Any) -> None:
        found = script.answer()
        _reply(response, {"state": found.state, "why": found.why, **found.snapshot})

    def entered_at(request: Any, response: Any) -> None:
        asked = FindCallSite(request.get_param("group"), int(request.get_param("number")))
        site = examine.find_call_site(asked)
        _reply(response, plain(site) if site.file else {})

    _register_handler(_EXAMINE, answer)
    _register_handler(_ENTERED_AT, entered_at)
    if dist.get_rank() == 0:
        options["handlers"] = [_handler(), *_handlers(options.get("handlers"))]
    try:
        start(port=port, **options)
    except KeyError as error:
        raise DdpLabError(f"the variable {error} is not set: start the script with torchrun or ddp-lab run") from error


def _start_debug_server() -> Any:
    try:
        from torch.distributed.debug import start_debug_server
    except ImportError as error:
        raise _too_old() from error
    if "fetch_timeout" not in inspect.signature(start_debug_server).parameters:
        raise _too_old()
    return start_debug_server


def _too_old() -> DdpLabError:
    return DdpLabError(f"ddp_lab.serve_doctor needs torch 2.12 or later, and this is {torch.__version__}")


def _handlers(given: Any) -> list[Any]:
    """Those that are given, else torch's own."""
    if given is not None:
        return list(given)
    try:
        from torch.distributed.debug._debug_handlers import default_handlers
    except ImportError as error:
        raise DdpLabError(
            f"torch's debug server needs the package {error.name}: `pip install jinja2 tabulate aiohttp` installs all "
            "that it needs"
        ) from error
    own: list[Any] = default_handlers()
    return own


def _reply(response: Any, told: Mapping[str, Any]) -> None:
    response.set_content(json.dumps(told), "application/json")
    response.set_status(_FOUND)


def _handler() -> Any:
    """The pages, of the class that the installed torch expects."""
    from torch.distributed.debug._frontend import DebugHandler, NavLink, Route, fetch_all

    class DoctorHandler(DebugHandler):
        """Pages of the doctor."""

        def routes(self) -> list[Any]:
            return [Route("/doctor", self._page), Route("/doctor.json", self._json)]

        def nav_links(self) -> list[Any]:
            return [NavLink("/doctor", "Doctor")]

        def templates(self) -> dict[str, str]:
            return {"doctor.html": _TEMPLATE}

        def dump(self) -> str:
            return str(HangReport.collect(self))

        def dump_filename(self) -> str:
            return "doctor"

        def _page(self, request: Any) -> bytes:
            report = HangReport.collect(self)
            page: bytes = request.frontend.render_template("doctor.html", report=report._repr_html_())
            return page

        def _json(self, request: Any) -> bytes:
            answers = self._answers(_EXAMINE)
            placed = {one.rank: one.entered_at for one in self._placed(answers)}
            told = [
                {"rank": rank, "entered_at": place and vars(place), **answers.get(rank, {"state": "silent"})}
                for rank, place in placed.items()
            ]
            return json.dumps({"ranks": told}).encode()

        def snapshots(self) -> list[RankSnapshot]:
            return self._placed(self._answers(_EXAMINE))

        def _answers(self, handler: str, asked: str = "") -> dict[int, dict[str, Any]]:
            _, answers = fetch_all(handler, asked, timeout=self.fetch_timeout)
            self._ranks = len(answers)
            return {rank: one.json() for rank, one in enumerate(answers) if one.status_code == _FOUND}

        def _placed(self, answers: Mapping[int, Mapping[str, Any]]) -> list[RankSnapshot]:
            told = ({"state": "silent", **answers.get(rank, {}), "rank": rank} for rank in range(self._ranks))
            found = [RankSnapshot.of_script(one) for one in told]
            return with_places(found, self._entered_at)

        def _entered_at(self, ranks: list[int], group: str, number: int) -> dict[int, dict[str, Any]]:
            return self._answers(_ENTERED_AT, f"group={quote(group)}&number={number}")

    return DoctorHandler()
