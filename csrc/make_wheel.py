"""`make wheel`: one wheel for this Python that serves every torch in pyproject.toml's list.

`python csrc/make_wheel.py` writes it to dist/; with `fetch` it only fetches what the wheel is compiled against. Each
torch comes from the package index, without what it requires, into a folder under build/: its headers and libraries
are all that compiling needs. auditwheel checks that the files load on any manylinux_2_28 system, and names them so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from install import PROJECT, tomllib

ROOT = PROJECT.parent
FETCHED = ROOT / "build" / "torch"
PLATFORM = "manylinux_2_28_x86_64"


def fetch(release: str) -> Path:
    """A folder with that torch, fetched once."""
    folder = FETCHED / f"{sys.implementation.cache_tag}-{release}"
    if not (folder / "torch" / "version.py").exists():
        print(f"fetching torch {release} (up to 1 GB)", flush=True)
        install = [sys.executable, ROOT / "csrc" / "install.py", "--no-deps", f"--target={folder}"]
        # A constraint on what may be installed does not concern what is compiled against.
        subprocess.run([*install, f"torch=={release}"], env={**os.environ, "UV_CONSTRAINT": ""}, check=True)
    return folder


def write(releases: list[str]) -> None:
    """Writes the wheel."""
    dist, raw = ROOT / "dist", ROOT / "build" / "wheel" / "raw"
    for stale in (dist, raw, *(ROOT / "build").glob("lib.*"), *(ROOT / "build").glob("bdist.*")):
        shutil.rmtree(stale, ignore_errors=True)
    environment = {
        **os.environ,
        "DDP_LAB_TORCH": os.pathsep.join(str(fetch(release)) for release in releases),
        "DDP_LAB_BUILD_DIR": str(ROOT / "build" / "wheel"),
        "DDP_LAB_MANYLINUX": "ON",
    }
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        raw,
        ROOT,
    ]
    subprocess.run(pip, env=environment, check=True)
    (made,) = raw.glob("*.whl")
    audit = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", dist]
    subprocess.run([*audit, "--exclude", "libtorch*", "--exclude", "libc10*", made], check=True)
    (wheel,) = dist.glob("*.whl")
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, for torch {', '.join(releases)}")


if __name__ == "__main__":
    listed = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["ddp_lab"]["torch"]
    if sys.argv[1:] == ["fetch"]:
        for each in listed:
            fetch(each)
    else:
        write(listed)
