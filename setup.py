"""Builds `ddp_lab._schedule` (standard library only) and `ddp_lab._C` (against the installed torch).

Where there is an MPI compiler wrapper (`mpicxx`, or what ``MPICXX`` names; empty for none), also `ddp_lab._mpi`.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
# With build isolation a second copy of the package may be on the path; sources stay relative to the root.
os.chdir(ROOT)

if not sys.platform.startswith("linux"):
    sys.exit(f"ddp_lab builds on Linux only; this is {platform.system()} (on Windows, use WSL 2)")

try:
    import pybind11
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        f"building ddp_lab needs {error.name}: `pip install torch==2.13.0 pybind11 ninja setuptools`, then "
        "`pip install --no-build-isolation .` (or leave that option out: pip installs them for the build)"
    )

WARNINGS = ["-Wall", "-Wextra", "-Werror"]
COMPILE = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", *WARNINGS]  # older releases of torch would say c++17
# DDP_LAB_SANITIZE=address or thread: tests/core/test_sanitized_ranks.py builds so, in a folder of its own.
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
SANITIZE = SANITIZERS.get(os.environ.get("DDP_LAB_SANITIZE", ""), [])
if SANITIZE:  # warnings of optimized code differ under a sanitizer
    COMPILE += ["-O1", "-g1", "-fno-omit-frame-pointer", "-Wno-error", *SANITIZE]
# Headers that are not ours are system headers, so that -Werror speaks of our sources alone.
PYBIND11 = ["-isystem", pybind11.get_include()]
TORCH_INCLUDE = Path(torch.__file__).parent / "include"

SCHEDULE_SOURCES = ["csrc/reduce/bucket_schedule.cpp", "csrc/reduce/replay.cpp", "csrc/schedule_bindings.cpp"]
MPI_SOURCES = [*sorted(str(p) for p in Path("csrc/mpi").glob("*.cpp")), "csrc/comm/shared_memory/work.cpp"]
_OTHERS = {*SCHEDULE_SOURCES[1:], *MPI_SOURCES[:-1]}
C_SOURCES = sorted(str(p) for p in Path("csrc").rglob("*.cpp") if str(p) not in _OTHERS)
MPI_NAME = "ddp_lab._mpi"


class Build(BuildExtension):  # type: ignore[misc]
    """torch's ninja build, in a folder that lasts, so that one changed source recompiles alone."""

    def finalize_options(self) -> None:
        super().finalize_options()
        base = os.environ.get("DDP_LAB_BUILD_DIR", "build")
        self.build_temp = str(Path(base, f"{sys.implementation.cache_tag}-torch{torch.__version__}"))

    def build_extension(self, ext: Extension) -> None:
        base, self.build_temp = (
            self.build_temp,
            str(Path(self.build_temp, ext.name)),
        )  # both compile bucket_schedule
        try:
            super().build_extension(ext)
        except Exception as error:
            if ext.name != MPI_NAME:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f'ddp_lab: built without the backend "mpi", everything else works: {reason}', file=sys.stderr)
        finally:
            self.build_temp = base

    def run(self) -> None:
        super().run()  # while it runs, `inplace` is off
        stamp = f'"""Written by setup.py: `_C` was compiled against it."""\n\nTORCH = "{torch.__version__}"\n'
        folder = Path("ddp_lab") if self.inplace else Path(self.build_lib, "ddp_lab")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_built_for.py").write_text(stamp)


def extension(name: str, sources: list[str], includes: list[str]) -> CppExtension:
    made = CppExtension(name, sources, include_dirs=[str(ROOT / "csrc")], extra_compile_args=[*COMPILE, *includes])
    made.extra_link_args = SANITIZE
    # CppExtension adds torch's folders as ordinary includes; system headers raise no warnings.
    ordinary = [d for d in made.include_dirs if not d.startswith(str(TORCH_INCLUDE))]
    system = [d for d in made.include_dirs if d.startswith(str(TORCH_INCLUDE))]
    made.include_dirs = ordinary
    for folder in system:
        made.extra_compile_args += ["-isystem", folder]
    return made


def schedule_extension() -> CppExtension:
    made = extension("ddp_lab._schedule", SCHEDULE_SOURCES, PYBIND11)
    made.libraries, made.library_dirs = [], []  # it loads where there is no torch
    return made


def mpi_flags() -> tuple[list[str], list[str]] | None:
    """What MPI's compiler wrapper adds for compiling and for linking; None without a wrapper."""
    wrapper = shutil.which(os.environ.get("MPICXX", "mpicxx"))
    if wrapper is None:
        return None
    # Open MPI's words, then MPICH's.
    for questions in (("--showme:compile", "--showme:link"), ("-compile_info", "-link_info")):
        answers = [subprocess.run([wrapper, question], capture_output=True, text=True) for question in questions]
        if all(answer.returncode == 0 for answer in answers):
            compiling, linking = (shlex.split(answer.stdout) for answer in answers)
            # Its own libraries know what they need; those of the former C++ interface may be missing.
            own = [flag for flag in linking if flag in ("-lmpi", "-lmpich")] or [f for f in linking if f[:2] == "-l"]
            folders = [flag[2:] for flag in compiling if flag.startswith("-I")]
            if any(Path(folder, "mpi.h").is_file() for folder in [*folders, "/usr/include"]):
                return (
                    [word for folder in folders for word in ("-isystem", folder)],
                    [*(flag for flag in linking if flag.startswith(("-L", "-Wl,"))), *own],
                )
    missing = f"{wrapper} finds no mpi.h (Debian: apt install libopenmpi-dev)"
    print(f'ddp_lab: building without the optional backend "mpi": {missing}', file=sys.stderr)
    return None


def mpi_extensions() -> list[CppExtension]:
    """`_mpi`, if it can be built; it is optional: whatever goes wrong, the others are built."""
    flags = None if SANITIZE else mpi_flags()
    if flags is None:
        return []
    made = extension(MPI_NAME, MPI_SOURCES, flags[0])
    made.extra_link_args = flags[1]
    made.optional = True
    return [made]


REQUIREMENTS = [
    # An extension loads with the torch it was compiled against, no other.
    f"torch=={torch.__version__.split('+')[0]}",
    "numpy>=1.26",
    "pandas>=2.1",
    "cloudpickle>=3.0",
    "ipyparallel>=9.0,<10",
    "ipykernel>=7.1",
    "ipython>=8.20",
    "ipywidgets>=8.1",
    "anywidget>=0.9.21",
    "plotly>=6.1,<8",
    "pyzmq>=26",
    "psutil>=5.9",
]

setup(
    ext_modules=[schedule_extension(), extension("ddp_lab._C", C_SOURCES, []), *mpi_extensions()],
    cmdclass={"build_ext": Build.with_options(use_ninja=True)},
    install_requires=REQUIREMENTS,
)
