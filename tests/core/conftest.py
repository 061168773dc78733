"""Builds the C++ test programs of this folder: `test_programs.py` runs them through the `program` fixture."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "tests"
RECORDER = ROOT / "csrc/record/recorder.cpp"
SHARED_MEMORY = ROOT / "csrc/comm/shared_memory"
# What each program is compiled with, besides its own file; standard library only, but for those of WITH_TORCH.
SOURCES = {
    "test_black_box": [ROOT / "csrc/record/black_box.cpp", RECORDER],
    "test_events": [],
    "test_graph_tasks": [],
    "test_phase": [],
    "test_recorder": [RECORDER],
    "test_replay": [ROOT / "csrc/reduce/bucket_schedule.cpp", ROOT / "csrc/reduce/replay.cpp"],
    "test_schedule": [ROOT / "csrc/reduce/bucket_schedule.cpp"],
    "test_shared_memory": [
        SHARED_MEMORY / f"{name}.cpp" for name in ("collectives", "group", "half", "kernels", "pool", "segment")
    ],
    "test_static_graph": [],
}
WITH_TORCH = ["test_shared_memory"]
HEADERS = [
    *sorted(ROOT.glob("csrc/record/*.h")),
    *sorted(SHARED_MEMORY.glob("*.h")),
    ROOT / "csrc/comm/piecewise.h",
    ROOT / "csrc/pages.h",
    ROOT / "csrc/reduce/bucket_schedule.h",
    ROOT / "csrc/reduce/graph_tasks.h",
    ROOT / "csrc/reduce/phase.h",
    ROOT / "csrc/reduce/replay.h",
    ROOT / "csrc/reduce/static_graph.h",
    *sorted(HERE.glob("*.h")),
]
FLAGS = ["-std=c++20", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{HERE}"]
VARIANTS = {
    "plain": ["-O2"],
    "address": ["-O0", "-D_GLIBCXX_ASSERTIONS", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}


def build(name: str, variant: str) -> Path:
    """Returns the compiled program; compiles it if a source or a flag has changed."""
    sources = [HERE / f"{name}.cpp", *SOURCES[name]]
    command = ["g++", *FLAGS, *VARIANTS[variant], "-x", "c++", "-", *(of_torch() if name in WITH_TORCH else [])]
    unit = "".join(f'#include "{source}"\n' for source in sources)  # so that torch's headers are read once
    digest = hashlib.sha256((" ".join(command) + unit).encode())
    for path in [*sources, *HEADERS]:
        digest.update(path.read_bytes())
    target = BUILT / f"{name}-{variant}-{digest.hexdigest()[:16]}"
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        for stale in BUILT.glob(f"{name}-{variant}-*"):
            stale.unlink()
        partial = target.with_suffix(".partial")
        done = subprocess.run([*command, "-o", str(partial)], input=unit, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        partial.rename(target)
    return target


def of_torch() -> list[str]:
    """Headers and libraries of the torch that is installed."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.submodule_search_locations is not None
    (folder,) = found.submodule_search_locations
    headers = [f"-isystem{folder}/include{inner}" for inner in ("", "/torch/csrc/api/include")]
    return [*headers, f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-ltorch_cpu", "-lc10"]


@pytest.fixture
def program() -> Callable[..., bytes]:
    """`program(name, variant)` runs a test program and returns its output; a failed check fails the test."""

    def run(name: str, variant: str = "plain") -> bytes:
        # The thread sanitizer of older compilers can't start where the kernel randomises addresses widely.
        fixed = ["setarch", "-R"] if variant == "thread" and can_fix_addresses() else []
        done = subprocess.run([*fixed, str(build(name, variant))], capture_output=True)
        output = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, f"exit code {done.returncode}\n{output}"
        return done.stdout

    return run


def can_fix_addresses() -> bool:
    if shutil.which("setarch") is None:
        return False
    return subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
