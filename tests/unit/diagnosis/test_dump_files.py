"""Files of Flight Recorders are read as plain data, and others are refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.diagnosis.sources import dump_files
from ddp_lab.errors import DdpLabError

DUMP: dict[str, Any] = {"version": "2.10", "entries": [], "pg_config": {}, "pg_status": {}}


class Command:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_pickled_and_json(tmp_path: Path) -> None:
    """A rank's two recorders are one dump, a folder's other files are left out. It counts more than the name; a file
    without any is refused."""
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(DUMP))
    (tmp_path / "gloo_rank_0.json").write_text(json.dumps(DUMP))
    (tmp_path / "nccl_trace_rank_12").write_bytes(pickle.dumps(DUMP))
    (tmp_path / "notes_3.txt").write_text("not a dump")
    (tmp_path / "README").write_text("{}")
    found = dump_files.read([tmp_path])
    assert [(one.rank, len(one.recorders)) for one in found] == [(0, 2), (12, 1)]
    (tmp_path / "of.json").write_text(json.dumps({**DUMP, "rank": 5}))
    assert [one.rank for one in dump_files.read([tmp_path / "of.json"])] == [5]
    (tmp_path / "of.json").write_text(json.dumps(DUMP))
    with pytest.raises(DdpLabError, match=r"the rank of .*of.json is unknown: its name must end with the rank"):
        dump_files.read([tmp_path / "of.json"])


def test_a_pickle_that_would_run_something(tmp_path: Path) -> None:
    """It is refused by name, also in a folder, and nothing of it has run."""
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps({**DUMP, "more": Command(tmp_path / "made")}))
    for path in (tmp_path, tmp_path / "trace_rank_0"):
        with pytest.raises(
            DdpLabError, match=r"trace_rank_0 is not a dump of .*: it names posix.mkdir, and dumps hold"
        ):
            dump_files.read([path])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"text", b"[1]", b'{"a": 1}', pickle.dumps([1])])
def test_a_file_of_something_else(tmp_path: Path, content: bytes) -> None:
    """If it was named, it is refused; in a folder it is left out."""
    (tmp_path / "some_0").write_bytes(content)
    with pytest.raises(DdpLabError, match=r"some_0 is not a dump of torch's Flight Recorder"):
        dump_files.read([tmp_path / "some_0"])
    with pytest.raises(DdpLabError, match="holds no dump of a Flight Recorder"):
        dump_files.read([tmp_path])
