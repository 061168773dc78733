"""`ddp-lab lessons`: lists lessons, copies them for students, and judges what students hand in."""

from __future__ import annotations

from .copies import copy_lessons, copy_support
from .lessons import Lesson, lessons, source
from .submissions import (
    ERROR,
    NO_CHECK,
    NOT_RUN,
    NOT_YET,
    PASSED,
    Judged,
    Limits,
    Mark,
    as_csv,
    as_json,
    as_text,
    judge,
)

__all__ = [
    "ERROR",
    "NOT_RUN",
    "NOT_YET",
    "NO_CHECK",
    "PASSED",
    "Judged",
    "Lesson",
    "Limits",
    "Mark",
    "as_csv",
    "as_json",
    "as_text",
    "copy_lessons",
    "copy_support",
    "judge",
    "lessons",
    "source",
]
