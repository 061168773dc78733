"""`make wheel`: wheels that serve every torch in pyproject.toml's list, one for each Python and architecture.

`python csrc/make_wheel.py [--arch ARCH] [PYTHON ...]` writes them to dist/; without a PYTHON, for the one that runs it.
With `fetch` in place of PYTHONs it only fetches what the wheel is compiled against. Each torch comes from the package
index, without what it requires, into a folder under build/: its headers and libraries are all that compiling needs. A
torch that has no wheel for that Python and architecture is named and left out. auditwheel finds the oldest system on
which the files load: it must be no newer than manylinux_2_28, which the wheel is named after, as torch's own.

A wheel has the documentation site, too, which `ddp-lab docs` opens. It adds 1.6 MB, because it has neither outputs of
cells nor pages of source files: those and plotly's script, which the outputs need, would add 3 MB and more.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from install import PROJECT, have_uv, tomllib

ROOT = PROJECT.parent
FETCHED = ROOT / "build" / "torch"
BUILT = ROOT / "build" / "wheel"
GLIBC = 28  # 2.28, torch's own
INSTALL = ROOT / "csrc" / "install.py"


@dataclass(frozen=True)
class Target:
    """What a wheel is for: an interpreter of that Python, its name in file names (cpython-311), and an architecture."""

    python: str
    tag: str
    arch: str

    @classmethod
    def of(cls, python: str, arch: str) -> Target:
        """The target of that Python."""
        asked = [python, "-c", "import sys; print(sys.implementation.cache_tag)"]
        return cls(python, subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip(), arch)

    @property
    def version(self) -> str:
        """3.11, say."""
        return self.tag.replace("cpython-3", "3.")

    @property
    def is_ours(self) -> bool:
        """Whether it is the Python and the architecture that run this."""
        return (self.tag, self.arch) == (sys.implementation.cache_tag, platform.machine())

    def __str__(self) -> str:
        return f"Python {self.version} on {self.arch}"


def manylinux(arch: str) -> str:
    """The name of the platform for which torch's wheels are, and ours."""
    return f"manylinux_2_{GLIBC}_{arch}"


def has_wheel(release: str, target: Target) -> bool:
    """Whether the package index has that torch for this target."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "torch", "--only-binary=:all:"]
    asked += [f"--platform={manylinux(target.arch)}", f"--python-version={target.version}"]
    listed = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    [versions] = re.findall(r"^Available versions: (.+)$", listed, re.MULTILINE)
    return release in versions.split(", ")


def fetch(release: str, target: Target) -> Path | None:
    """A folder with that torch, fetched once; None where there is no such wheel."""
    folder = FETCHED / (f"{target.tag}-{release}" + ("" if target.arch == platform.machine() else f"-{target.arch}"))
    if (folder / "torch" / "version.py").exists():
        return folder
    print(f"fetching torch {release} for {target} (up to 1 GB)", flush=True)
    options = ["--no-deps", f"--target={folder}"]
    if not target.is_ours:
        uvs, pips = f"--python-platform={target.arch}-manylinux_2_{GLIBC}", f"--platform={manylinux(target.arch)}"
        options += [uvs if have_uv() else pips, f"--python-version={target.version}", "--only-binary=:all:"]
    # A constraint on what may be installed does not concern what is compiled against.
    environment = {**os.environ, "UV_CONSTRAINT": "", "PIP_CONSTRAINT": os.devnull}
    command = [sys.executable, INSTALL, *options, f"torch=={release}"]
    if subprocess.run(command, env=environment, check=False).returncode == 0:
        return folder
    if has_wheel(release, target):
        sys.exit(f"could not fetch torch {release} for {target}")
    print(f"torch {release} has no wheel for {target}: ours does not serve that torch", flush=True)
    return None


def with_tools(target: Target) -> str:
    """An interpreter of the target's Python that has what builds a wheel: this one, or one of its own environment."""
    if target.tag == sys.implementation.cache_tag:
        return sys.executable
    folder = BUILT / target.tag
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([target.python, "-m", "venv", folder], check=True)
    needed = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["build-system"]["requires"]
    subprocess.run([python, INSTALL, *needed], check=True)
    return str(python)


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


def compile_wheel(target: Target, torches: list[Path]) -> Path:
    """Builds the wheel as it loads on this system, without documents; returns its path."""
    raw = BUILT / "raw"
    for stale in (raw, *(ROOT / "build").glob("lib.*"), *(ROOT / "build").glob("bdist.*")):
        shutil.rmtree(stale, ignore_errors=True)
    environment = {
        **os.environ,
        "DDP_LAB_TORCH": os.pathsep.join(map(str, torches)),
        "DDP_LAB_BUILD_DIR": str(BUILT),
        "DDP_LAB_MANYLINUX": "ON",
        "DDP_LAB_ARCH": target.arch,
    }
    pip = [with_tools(target), "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", raw]
    subprocess.run([*pip, ROOT], env=environment, check=True)
    (made,) = raw.glob("*.whl")
    return made


def audit(made: Path, target: Target, dist: Path) -> Path:
    """Checks on which systems the files of a wheel load, and names it for manylinux_2_28 in `dist`; returns its path.

    auditwheel takes this machine's architecture alone as a goal, so that it is asked what it finds.
    """
    checked = BUILT / "checked"
    shutil.rmtree(checked, ignore_errors=True)
    repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", checked]
    subprocess.run([*repair, "--exclude", "libtorch*", "--exclude", "libc10*", made], check=True)
    (found,) = checked.glob("*.whl")
    level = re.search(rf"manylinux_2_(\d+)_{target.arch}", found.name)
    if level is None or int(level[1]) > GLIBC:
        sys.exit(f"{found.name} does not load where glibc is 2.{GLIBC}: see `auditwheel show {made}`")
    tag = f"--platform-tag=+{manylinux(target.arch)}"
    subprocess.run(
        [sys.executable, "-m", "wheel", "tags", "--remove", tag, found], check=True, stdout=subprocess.DEVNULL
    )
    (named,) = checked.glob("*.whl")
    dist.mkdir(exist_ok=True)
    for former in dist.glob(f"*-{target.tag.replace('cpython-', 'cp')}-*_{target.arch}.whl"):
        former.unlink()
    return Path(shutil.move(named, dist))


def write(targets: list[Target], releases: list[str]) -> None:
    """Writes the wheels."""
    docs = BUILT / "docs"
    build_docs(docs)
    for target in targets:
        torches = {release: found for release in releases if (found := fetch(release, target)) is not None}
        if not torches:
            sys.exit(f"there is no torch for {target}")
        made = compile_wheel(target, list(torches.values()))
        add_docs(made, docs)
        wheel = audit(made, target, ROOT / "dist")
        print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, for torch {', '.join(torches)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Builds wheels.")
    parser.add_argument("--arch", default=platform.machine(), help="the architecture (default: this machine's)")
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters, or `fetch`")
    given = parser.parse_args()
    listed = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["ddp_lab"]["torch"]
    if given.pythons == ["fetch"]:
        for each in listed:
            fetch(each, Target.of(sys.executable, given.arch))
    else:
        write([Target.of(python, given.arch) for python in given.pythons], listed)
