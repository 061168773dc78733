"""Texts that somebody has read: each is a file of `texts/`. DDP_LAB_APPROVE=1 writes them anew, to be read again."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).with_name("texts")


def approved(name: str, text: str) -> None:
    """Asserts that a text is the approved one, word for word."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("DDP_LAB_APPROVE"):
        path.write_text(text + "\n", encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()
