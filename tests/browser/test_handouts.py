"""`make handouts`: what a class gets on paper fits on paper."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
# Pixels by which what a page holds is larger than the page.
OVERFLOW = """() => {
  const { scrollWidth, clientWidth, scrollHeight, clientHeight } = document.body;
  return Math.max(scrollWidth - clientWidth, scrollHeight - clientHeight);
}"""


def test_each_handout_is_one_page(tmp_path: Path, page: Page) -> None:
    """The script writes two PDFs, each one page of A4, and the same as HTML; nothing is cut off."""
    command = [sys.executable, "tutorials/site/handouts.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {"magics", "timeline"}
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("html", "pdf")
    }
    for name in names:
        written = (tmp_path / f"{name}.pdf").read_bytes()
        assert len(re.findall(rb"/Type\s*/Page\b", written)) == 1, name
        assert re.search(rb"/MediaBox\s*\[0 0 59[45][.\d]* 84[12]", written), name
        page.goto((tmp_path / f"{name}.html").as_uri())
        assert page.evaluate(OVERFLOW) <= 0, name
