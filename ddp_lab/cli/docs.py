"""`ddp-lab docs`: opens a page of the documentation."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from typing import Any

from .. import documentation

__all__ = ["add"]


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    made = commands.add_parser(
        "docs",
        help="open the documentation in the browser",
        description="Opens the documentation, which needs no network, in the browser. A wheel of `make wheel` contains "
        "it; in a clone, `make site` builds it. Exit code 1: it is not there, or has no such page.",
        examples=("ddp-lab docs", "ddp-lab docs guide/dashboard", "ddp-lab docs troubleshooting#firewall"),
    )
    made.add_argument(
        "page",
        nargs="?",
        default="index",
        metavar="PAGE",
        help="a page, and a heading of it, as in links of the site (the first page)",
    )
    made.add_argument(
        "--print", action="store_true", dest="only_print", help="print the path of its file and open nothing"
    )
    made.set_defaults(call=_show)


def _show(arguments: argparse.Namespace) -> int:
    path, heading = documentation.page(arguments.page)
    if arguments.only_print:
        print(path)
        return 0
    address = documentation.address(path, heading)
    print(address, flush=True)
    if not webbrowser.open(address):
        print("ddp-lab: no browser can be opened here: open this address in yours", file=sys.stderr)
    return 0
