"""`make wheel`: one wheel for this Python that serves every torch in pyproject.toml's list.

`python csrc/make_wheel.py` writes it to dist/; with `fetch` it only fetches what the wheel is compiled against. Each
torch comes from the package index, without what it requires, into a folder under build/: its headers and libraries
are all that compiling needs. auditwheel checks that the files load on any manylinux_2_28 system, and names them so.

The wheel has the documentation site, too, which `ddp-lab docs` opens. It adds 1.6 MB, because it has neither outputs of
cells nor pages of source files: those and plotly's script, which the outputs need, would add 3 MB and more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
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


def build_docs(folder: Path) -> None:
    """Builds the documentation site as a wheel has it."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = ["-D", f"executed={folder / 'none'}", "-D", "source_pages=0", "-d", f"{folder}.doctrees"]
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-c", "tutorials/site", *settings]
    subprocess.run([*sphinx, ".", folder], cwd=ROOT, check=True)
    (folder / "_static" / "plotly.min.js").unlink()


def add_docs(wheel: Path, docs: Path) -> None:
    """Puts the site among the files that a wheel installs beside the package."""
    tool = [sys.executable, "-m", "wheel"]
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run([*tool, "unpack", "--dest", unpacked, wheel], check=True, stdout=subprocess.DEVNULL)
        [tree] = Path(unpacked).iterdir()
        shutil.copytree(docs, tree / f"{tree.name}.data" / "data" / "share" / "ddp_lab" / "docs")
        subprocess.run([*tool, "pack", "--dest-dir", wheel.parent, tree], check=True, stdout=subprocess.DEVNULL)


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
    docs = ROOT / "build" / "wheel" / "docs"
    build_docs(docs)
    add_docs(made, docs)
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
