"""The extension under the address, undefined-behaviour and thread sanitizers, in trainings on real ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.conftest import can_fix_addresses
from tests.waiting import DEADLINE_S

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIZE = 2
RUNTIME = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
OPTIONS = {
    # Python and torch free nothing at exit. libstdc++ comes with torch: its throw must be found at the start.
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:exitcode=66",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66",
    },
    # Python and torch are not compiled with it: their memory accesses don't count, their mutexes do.
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=66"},
}


def _runtime(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    assert path.is_absolute(), f"g++ has no {name}"
    return str(path.resolve())


def _build(sanitizer: str) -> Path:
    """Compiles the package with the sanitizer into a folder of its own; what has not changed is not compiled again."""
    folder = ROOT / "build" / "sanitized" / sanitizer
    library = folder / "lib"
    shutil.rmtree(library / "ddp_lab", ignore_errors=True)
    environment = {**os.environ, "DDP_LAB_SANITIZE": sanitizer, "DDP_LAB_BUILD_DIR": str(folder)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # ninja
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(library)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for path in (ROOT / "ddp_lab").rglob("*.py"):
        target = library / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    return library


@pytest.mark.soak
@pytest.mark.parametrize("sanitizer", RUNTIME)
def test_ranks_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """Every kind of backward, paused, watched, changed and observed ones too: no sanitizer reports anything of ours."""
    library = _build(sanitizer)
    preload = [_runtime(name) for name in [*RUNTIME[sanitizer], "libstdc++.so.6"]]
    environment = {
        **os.environ,
        **OPTIONS[sanitizer],
        "LD_PRELOAD": " ".join(preload),
        "PYTHONPATH": str(library),
        "OMP_NUM_THREADS": "1",
    }
    # The thread sanitizer of older compilers can't start where the kernel randomises addresses widely.
    fixed = ["setarch", "-R"] if sanitizer == "thread" and can_fix_addresses() else []
    command = [*fixed, sys.executable, str(HERE / "sanitized_training.py"), str(tmp_path / "store")]
    logs = [tmp_path / f"rank{rank}.log" for rank in range(SIZE)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            ranks.append(
                subprocess.Popen([*command, str(rank), str(SIZE)], env=environment, stdout=output, stderr=output)
            )
    try:
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for code, log in zip(codes, logs, strict=True):
        text = log.read_text(errors="replace")
        assert code == 0, text[:20000]
        assert f"{library}/ddp_lab/_extensions/torch" in text, text
        assert "observed done" in text, text[-2000:]
        assert "shared_memory done" in text, text[-2000:]
        assert "Sanitizer" not in text, text[:20000]
