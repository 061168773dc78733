"""Where the documentation site is, and the line that leads from a message to its heading on the troubleshooting page.

The site is in `build/docs` of a clone after `make site`, and among the files that a wheel has installed.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import sysconfig
from pathlib import Path

from .errors import DdpLabError

__all__ = ["address", "more", "page", "with_help"]

_PACKAGE = Path(__file__).resolve().parent
_FOLDERS = (_PACKAGE.parent / "build" / "docs", Path(sysconfig.get_path("data"), "share", "ddp_lab", "docs"))
_SITE = Path("tutorials", "site")
_TROUBLESHOOTING = "troubleshooting"
_DOCUMENTATION = "Documentation"  # the name of the site's address in the package's metadata


def with_help(message: str, heading: str) -> str:
    """A message and, on a line of its own, where its heading is.

    Args:
        message: what happened, and what to do.
        heading: the name that stands above the heading in `tutorials/site/troubleshooting.md`.
    """
    return f"{message}\n{more(heading)}"


def more(heading: str) -> str:
    """The line that leads to a heading of the troubleshooting page: its address, or the command that opens it."""
    online = _online()
    if online:
        return f"More: {online}/{(_SITE / _TROUBLESHOOTING).as_posix()}.html#{heading}"
    return f"More: `ddp-lab docs {_TROUBLESHOOTING}#{heading}`"


def _online() -> str:
    """The address of the site on the network, if the package's metadata has one."""
    try:
        named = importlib.metadata.metadata("ddp_lab").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is only on the path
        return ""
    found: dict[str, str] = dict(one.split(", ", 1) for one in named)
    return found.get(_DOCUMENTATION, "").rstrip("/")


def page(name: str = "index") -> tuple[Path, str]:
    """The file of a page, and the heading in it.

    Args:
        name: as in a link of the site, with or without a suffix and a heading: ``"guide/dashboard"``,
            ``"troubleshooting#firewall"``, ``"README"``.

    Raises:
        DdpLabError: the site has not been built, or has no such page or heading.
    """
    folder = _folder()
    wanted, _, heading = name.partition("#")
    wanted = re.sub(r"\.(md|html|ipynb)$", "", wanted.strip("/")) or "index"
    for path in (folder / _SITE / f"{wanted}.html", folder / f"{wanted}.html"):
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            break
    else:
        raise DdpLabError(f"the documentation has no page {wanted!r}{_closest(wanted, _pages(folder))}")
    headings = re.findall(r'\bid="([^"]+)"', path.read_text(encoding="utf-8")) if heading else [heading]
    if heading not in headings:
        raise DdpLabError(f"the page {wanted!r} has no heading {heading!r}{_closest(heading, headings)}")
    return path, heading


def address(path: Path, heading: str) -> str:
    """What a browser opens for what `page` has found."""
    return f"{path.as_uri()}#{heading}" if heading else path.as_uri()


def _folder() -> Path:
    for folder in _FOLDERS:
        if (folder / "index.html").is_file():
            return folder
    online = _online()
    if online:
        raise DdpLabError(f"the documentation is not installed here: it is at {online}")
    if (_PACKAGE.parent / "Makefile").is_file():
        raise DdpLabError(
            f"the documentation has not been built in {_PACKAGE.parent}: run `make site` there (`make docs` also runs "
            "the notebooks)"
        )
    raise DdpLabError(
        f"the documentation is not in {_FOLDERS[-1]}: a wheel of `make wheel` has it; in a clone, run `make site`"
    )


def _pages(folder: Path) -> list[str]:
    """The names of all pages but those of source files."""
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.html"))
    return [
        (path.relative_to(_SITE) if path.is_relative_to(_SITE) else path).as_posix()
        for path in paths
        if path.parts[0] not in ("source", "_static")
    ]


def _closest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
