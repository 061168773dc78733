"""The lessons on GPUs, without a change: they run to the end, and their checks know right answers from wrong ones."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.notebooks.judging import executed, judge
from tests.notebooks.running import GPU_ENVIRONMENT, LESSONS, module_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.soak,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available: no CUDA device or driver"),
]


@pytest.mark.parametrize("lesson", [path.stem for path in LESSONS])
def test_lesson(lesson: str) -> None:
    """As on the CPU."""
    wrong = importlib.import_module(f"tests.notebooks.test_{module_of(lesson)}").WRONG
    judge(executed(lesson, wrong, GPU_ENVIRONMENT), wrong)
