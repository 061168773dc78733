"""Texts that somebody has read: each is a file of `texts/`. DDP_LAB_APPROVE=1 writes them anew, to be read again."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("texts")


def approved(name: str, text: str) -> None:
    """Fails with a diff if a text is not the approved one, word for word."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("DDP_LAB_APPROVE"):
        path.write_text(text + "\n", encoding="utf-8")
    wanted = path.read_text(encoding="utf-8").splitlines()
    if wanted != text.splitlines():
        diff = difflib.unified_diff(wanted, text.splitlines(), str(path), "now", n=0, lineterm="")
        pytest.fail("\n".join(diff), pytrace=False)
