"""The reference pages of the site name everything that there is, and nothing else."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import ddp_lab
from ddp_lab.protocol.events import DTYPE, Kind
from tests.unit.conftest import SITE

# What other packages of ours use, and users do not need; `find` stands with `attach`, the same method.
INTERNAL = {
    "Cluster": {"busy_ranks", "client", "dashboard_means", "engine_of_rank", "find", "session", "wire"},
    "Timeline": {
        "model_to_analyse",
        "buffer_shapes",
        "collective_columns",
        "collectives_in",
        "columns",
        "extend",
        "history",
        "analysis_layout",
        "kind",
    }
    | {"analysis_input", "layouts", "model_with_groups", "noticed", "parameter_group_columns", "parts_of", "processes"}
    | {"set_status", "finished_steps", "step_columns", "sync_columns", "snapshot_of_events", "views", "views_of"},
}


@pytest.mark.parametrize("page", ["Cluster", "Timeline"])
def test_each_method_is_in_one_group(page: str) -> None:
    """Every public method and property of the class stands once on its page, below one of the headings."""
    text = (SITE / "api" / f"{page.lower()}.md").read_text(encoding="utf-8")
    listed = re.findall(rf"^\.\. auto(?:method|property):: {page}\.(\w+)$", text, re.MULTILINE)
    public = {name for name in vars(getattr(ddp_lab, page)) if not name.startswith("_")} | inherited(page)
    assert public >= INTERNAL[page]
    assert sorted(listed) == sorted(public - INTERNAL[page])
    assert len(re.findall(r"^## ", text, re.MULTILINE)) >= 6


def inherited(page: str) -> set[str]:
    """Public names that the class has from classes of ours."""
    kinds = [kind for kind in inspect.getmro(getattr(ddp_lab, page))[1:] if kind.__module__.startswith("ddp_lab")]
    return {name for kind in kinds for name in vars(kind) if not name.startswith("_")}


def test_fields_and_kinds_of_an_event() -> None:
    """The page of file formats has each field of an event with its dtype, each kind with its number, and the size."""
    text = (SITE / "reference" / "file_formats.md").read_text(encoding="utf-8")
    fields = re.findall(r"^\| `([a-z_]+)` \| (u?int\d+) \|", text, re.MULTILINE)
    assert fields == [(name, np.dtype(DTYPE[name]).name) for name in DTYPE.names]
    kinds = re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert kinds == [(str(kind.value), kind.name) for kind in Kind if kind is not Kind.NONE]
    assert f"A record of {DTYPE.itemsize} bytes" in text
