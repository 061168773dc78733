"""`ddp-lab docs` opens pages of a built site, and messages name the place that the reader has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MORE = "from ddp_lab.documentation import with_help; print(with_help('The port is closed.', 'firewall'))"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package, with a site of two pages where `make site` builds it."""
    without = shutil.ignore_patterns("__pycache__", "_extensions", "*.so", "static")
    shutil.copytree(ROOT / "ddp_lab", tmp_path / "ddp_lab", ignore=without)
    shutil.copy(ROOT / "Makefile", tmp_path)
    site = tmp_path / "build" / "docs" / "tutorials" / "site"
    (site / "guide").mkdir(parents=True)
    for page in (tmp_path / "build" / "docs" / "index.html", site / "index.html", site / "guide" / "dashboard.html"):
        page.write_text('<h1>A page</h1><h2 id="overlap">Overlap</h2>')
    return tmp_path


def call(tree: Path, *command: str, code: int = 0, **variables: str) -> tuple[str, str]:
    """Runs Python with the copied package and these environment variables; returns its stdout and stderr."""
    opened = tree / "browser"
    opened.write_text(f'#!/bin/sh\necho "$1" >>{tree}/opened\n')
    opened.chmod(0o755)
    environment = {**os.environ, "BROWSER": f"{opened} %s", **variables}
    done = subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def docs(tree: Path, *arguments: str, code: int = 0, **variables: str) -> tuple[str, str]:
    """Runs the command."""
    return call(tree, "-m", "ddp_lab", "docs", *arguments, code=code, **variables)


@pytest.mark.parametrize("name", ["guide/dashboard", "guide/dashboard.md", "tutorials/site/guide/dashboard.html"])
def test_a_page_is_opened_at_its_heading(tree: Path, name: str) -> None:
    """The browser gets the address that is printed."""
    page = tree / "build" / "docs" / "tutorials" / "site" / "guide" / "dashboard.html"
    printed, _ = docs(tree, f"{name}#overlap")
    assert printed == f"{page.as_uri()}#overlap\n"
    assert (tree / "opened").read_text() == printed


def test_without_a_browser(tree: Path) -> None:
    """With --print the path of the first page, and no browser. Where none can be opened, the address is printed, and a
    line says what to do with it. In a clone whose site is not built the error names the command that builds it."""
    printed, _ = docs(tree, "--print")
    assert printed == f"{tree / 'build' / 'docs' / 'tutorials' / 'site' / 'index.html'}\n"
    assert not (tree / "opened").exists()
    without = {"BROWSER": "/nowhere/browser %s", "PATH": str(tree), "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    printed, advice = docs(tree, **without)
    assert printed.startswith("file://")
    assert "open this address in yours" in advice
    shutil.rmtree(tree / "build")
    _, error = docs(tree, code=1)
    assert "run `make site` there" in error
    assert not (tree / "build").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("guide/dashbord", "no page 'guide/dashbord'; did you mean 'guide/dashboard'?"),
        ("guide/dashboard#overlaps", "no heading 'overlaps'; did you mean 'overlap'?"),
        ("../../../secret", "no page '../../../secret'"),
    ],
)
def test_an_unknown_page_or_heading_is_an_error(tree: Path, name: str, words: str) -> None:
    """The error names it, and the closest name that there is; files outside of the site are not pages."""
    (tree / "secret.html").touch()
    printed, error = docs(tree, name, code=1)
    assert printed == ""
    assert words in error


def test_messages_lead_to_the_command_or_to_the_site_on_the_network(tree: Path) -> None:
    """Without an address in the package's metadata a message names the command, else that address."""
    assert call(tree, "-c", MORE)[0] == "The port is closed.\nMore: `ddp-lab docs troubleshooting#firewall`\n"
    about = tree / "ddp_lab-9.9.dist-info"
    about.mkdir()
    address = "https://docs.example.org/ddp_lab"
    (about / "METADATA").write_text(f"Name: ddp_lab\nVersion: 9.9\nProject-URL: Documentation, {address}/\n")
    page = f"{address}/tutorials/site/troubleshooting.html"
    assert call(tree, "-c", MORE)[0] == f"The port is closed.\nMore: {page}#firewall\n"
