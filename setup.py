"""Builds the extensions with CMake (csrc/CMakeLists.txt): `_schedule`, and for each torch a `_C`.

Everything else about the package is in pyproject.toml. Environment variables:

* ``DDP_LAB_TORCH``: folders (or patterns), separated by ``:``, in each of which is a torch package to build for;
  without it, the torch that is installed.
* ``MPICXX``: MPI's compiler wrapper, ``mpicxx`` say: builds the backend "mpi", too.
* ``DDP_LAB_BUILD_DIR``: where object files stay, ``build`` if it is not set.
* ``DDP_LAB_MANYLINUX``: ``ON`` if the files are to load on older systems (csrc/manylinux.cpp).
* ``DDP_LAB_ARCH``: the architecture to build for, ``aarch64`` say, with its cross compiler; ``DDP_LAB_TORCH`` then
  names torch packages of that architecture.
* ``DDP_LAB_SANITIZE``: ``address`` or ``thread``, for tests/core/test_sanitized_ranks.py.
* ``MAX_JOBS``: how many compilers run at once.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# With build isolation a second copy of the package may be on the path; sources stay relative to the root.
os.chdir(ROOT)

SANITIZERS = {
    "": "",
    "address": "-fsanitize=address,undefined;-fno-sanitize=vptr;-fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
ARCH = os.environ.get("DDP_LAB_ARCH") or platform.machine()
GIB_A_COMPILER = 2  # at most, see the note in csrc/CMakeLists.txt


def torch_packages() -> list[Path]:
    """The folders of the torch packages to build for. None of them is imported: a CUDA build may lack its libraries."""
    named = os.environ.get("DDP_LAB_TORCH")
    if named:
        patterns = named.split(os.pathsep)
        return [Path(folder).resolve() / "torch" for pattern in patterns for folder in sorted(glob.glob(pattern))]
    found = importlib.util.find_spec("torch")
    if found is not None and found.submodule_search_locations:
        return [Path(found.submodule_search_locations[0])]
    outer = Path(sysconfig.get_path("platlib"), "torch")  # of the environment that an isolated build is made for
    if not outer.is_dir():
        sys.exit("building ddp_lab needs torch: `pip install torch`, then `pip install --no-build-isolation .`")
    return [outer]


def version_of(torch: Path) -> str:
    """What the package says of itself, ``2.13.0+cpu`` say."""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", (torch / "version.py").read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"{torch / 'version.py'} names no version")
    return found.group(1)


def program(name: str) -> str:
    """CMake or ninja: this environment's, else the system's."""
    found = shutil.which(name, path=f"{sysconfig.get_path('scripts')}:{os.environ.get('PATH', '')}")
    if found is None:
        sys.exit(f"building ddp_lab needs {name}: `pip install {name}`")
    return found


def jobs() -> int:
    """As many compilers as there are cores and memory for."""
    if os.environ.get("MAX_JOBS"):
        return int(os.environ["MAX_JOBS"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return max(1, min(len(os.sched_getaffinity(0)), memory // GIB_A_COMPILER))


def cross_definitions() -> list[str]:
    """What CMake needs to know to build for another architecture than this machine's."""
    if platform.machine() == ARCH:
        return []
    compiler = f"{ARCH}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        sys.exit(f"building ddp_lab for {ARCH} needs {compiler} (Debian: apt install g++-{ARCH}-linux-gnu)")
    target = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": ARCH, "CXX_COMPILER": compiler}
    return [f"-DCMAKE_{name}={value}" for name, value in target.items()]


def python_includes(folder: Path) -> str:
    """The folders of Python's headers, for CMake.

    Debian's pyconfig.h includes one for the architecture that is compiled for. Another architecture's is seldom
    installed; this one's serves, because both have the same sizes of types.
    """
    headers = Path(sysconfig.get_path("include"))
    ours = headers.parent / f"{platform.machine()}-linux-gnu" / headers.name / "pyconfig.h"
    if platform.machine() == ARCH or not ours.exists():
        return str(headers)
    theirs = folder / "include" / f"{ARCH}-linux-gnu" / headers.name
    theirs.mkdir(parents=True, exist_ok=True)
    shutil.copy(ours, theirs)
    return f"{headers};{folder / 'include'}"


def mpi_definitions() -> list[str]:
    """What the compiler wrapper that MPICXX names adds for compiling and linking, for CMake."""
    named = os.environ.get("MPICXX")
    if not named:
        return []
    wrapper = shutil.which(named)
    if wrapper is None:
        sys.exit(
            f'the backend "mpi" needs MPI\'s compiler, but there is no {named} (Debian: apt install libopenmpi-dev)'
        )
    # Open MPI's words, then MPICH's.
    for questions in (("--showme:compile", "--showme:link"), ("-compile_info", "-link_info")):
        answers = [subprocess.run([wrapper, question], capture_output=True, text=True) for question in questions]
        if all(answer.returncode == 0 for answer in answers):
            compiling, linking = (shlex.split(answer.stdout) for answer in answers)
            # Its own libraries know what they need; those of the former C++ interface may be missing.
            own = [flag for flag in linking if flag in ("-lmpi", "-lmpich")] or [f for f in linking if f[:2] == "-l"]
            folders = [flag[2:] for flag in compiling if flag.startswith("-I")]
            if any(Path(folder, "mpi.h").is_file() for folder in [*folders, "/usr/include"]):
                libraries = [*(flag for flag in linking if flag.startswith(("-L", "-Wl,"))), *own]
                return [f"-DMPI_INCLUDES={';'.join(folders)}", f"-DMPI_LIBRARIES={';'.join(libraries)}"]
    sys.exit(
        f'the backend "mpi" needs MPI\'s headers, but {wrapper} finds no mpi.h (Debian: apt install libopenmpi-dev)'
    )


class Build(build_ext):
    """CMake, in a folder that lasts for each torch, so that a changed source compiles alone."""

    def run(self) -> None:
        package = (Path() if self.inplace else Path(self.build_lib)).resolve() / "ddp_lab"
        for number, torch in enumerate(torch_packages()):
            self.build_for(torch, package, schedule=number == 0)

    def build_for(self, torch: Path, package: Path, schedule: bool) -> None:
        """Builds one torch's `_C`, which goes into a folder named after the minor release; and `_schedule`, once."""
        version = version_of(torch)
        base = os.environ.get("DDP_LAB_BUILD_DIR", "build")
        cross = cross_definitions()
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).replace(platform.machine(), ARCH)
        folder = Path(base, f"{sys.implementation.cache_tag}-torch{version}{f'-{ARCH}' if cross else ''}").resolve()
        output = package / "_extensions" / f"torch{'.'.join(version.split('.')[:2])}"
        sanitizer = os.environ.get("DDP_LAB_SANITIZE", "")
        configure = [program("cmake"), "-S", "csrc", "-B", folder, "-G", "Ninja", "--log-level=WARNING"]
        definitions = [
            f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
            f"-DPYTHON_INCLUDE={python_includes(folder)}",
            f"-DEXTENSION_SUFFIX={suffix}",
            f"-DTORCH_FOLDER={torch}",
            f"-DOUTPUT={output}",
            f"-DSCHEDULE_OUTPUT={package if schedule else ''}",
            f"-DSANITIZE={SANITIZERS[sanitizer]}",
            f"-DMANYLINUX={os.environ.get('DDP_LAB_MANYLINUX', '')}",
            *cross,
            *((not cross and mpi_definitions()) or ["-UMPI_LIBRARIES"]),
        ]
        first = not (folder / "build.ninja").exists()
        print(f"compiling for torch {version}{' (about 80 s on 2 cores)' if first else ''}", flush=True)
        subprocess.run([*configure, *definitions], check=True, stdout=subprocess.DEVNULL)
        compiling = subprocess.run([program("cmake"), "--build", folder, "--parallel", str(jobs())], check=False)
        if compiling.returncode:
            sys.exit("compiling ddp_lab failed: the compiler's error is above")
        (output / "built_for.txt").write_text(f"{version}\n")

    def get_outputs(self) -> list[str]:
        return []  # wheels take what lies in the folder of the build


# Another architecture's wheel is named after it, and its files do not mix with those of this one.
OF_ANOTHER = {
    "bdist_wheel": {"plat_name": f"linux_{ARCH}"},
    "build": {"build_platlib": f"build/lib.linux-{ARCH}-{sys.implementation.cache_tag}"},
}

setup(
    # CMake knows the sources; that there is an extension makes a wheel one for this Python and platform.
    ext_modules=[Extension("ddp_lab._schedule", sources=[])],
    cmdclass={"build_ext": Build},
    options={} if platform.machine() == ARCH else OF_ANOTHER,
)
