"""Builds `ddp_lab._schedule` (standard library only) and `ddp_lab._C` (against the installed torch).

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
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
C_SOURCES = sorted(str(p) for p in Path("csrc").rglob("*.cpp") if str(p) not in SCHEDULE_SOURCES[1:])


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
        super().build_extension(ext)
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
    ext_modules=[schedule_extension(), extension("ddp_lab._C", C_SOURCES, [])],
    cmdclass={"build_ext": Build.with_options(use_ninja=True)},
    install_requires=REQUIREMENTS,
)
