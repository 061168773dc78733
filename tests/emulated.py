"""`make emulated`: ddp_lab on aarch64, on a machine of another architecture, through QEMU's emulation.

`python -m tests.emulated [WHEEL]` makes a Debian root below build/emulated once, installs torch for aarch64 and the
wheel there, and runs the C++ programs and the tests of CLAIMS. Without WHEEL, `make wheel ARCH=aarch64` makes it.
PYTEST_ARGS reaches pytest: ``-k doctor``, say.

It measures nothing: an emulated processor is some ten times slower. Nor does it show what a weak memory model shows:
QEMU keeps the order of the machine that it runs on.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from csrc.install import PROJECT, requirements, tomllib
from tests.core.conftest import FLAGS, HERE, SOURCES, VARIANTS, WITH_TORCH
from tests.core.test_programs import NAMES
from tests.roots import ROOT, SUITES, TREE, VENV, Missing, Root, need

ARCH = "aarch64"
TORCH = "torch==2.13.0"
# Beside the package's own requirements: what the tests below import.
PACKAGES = (
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "expecttest>=0.3",
    "papermill>=2.6",
)
CLAIMS = {
    "ranks over Gloo, bit-equal with torch's DDP": [
        "tests/ranks/reducer/test_gradients.py",  # on 2 and 4 ranks, all dtypes
    ],
    "shm: all dtypes and collectives on 2 and 4 ranks, and gradients over it": [
        "tests/ranks/comm/test_shared_memory.py",
        "tests/ranks/reducer/test_in_place.py::test_gradients_are_those_of_gloo",
        "tests/ranks/reducer/test_shared_buckets.py::test_buckets_live_there",
    ],
    "a cluster in a kernel: cells, errors, interrupts": [
        "tests/cluster/test_magics.py::test_outputs_are_labelled",
        "tests/cluster/test_magics.py::test_failed_cell",
        "tests/cluster/test_magics.py::test_interrupt",
    ],
    "a killed rank": [
        "tests/cluster/test_killed.py::test_a_killed_rank_is_an_event",
        "tests/cluster/test_killed.py::test_dead_ranks_get_new_processes",
    ],
    "the doctor, with lines": [
        "tests/cluster/test_doctor.py::test_a_part_of_the_ranks",
        "tests/cluster/test_doctor.py::test_the_sentence",
    ],
    "ddp-lab run, with a report": [
        "tests/ranks/launch/test_run.py::test_scripts_with_two_models_and_with_none",
    ],
    "debugger": [
        "tests/cluster/test_visual_debugger.py::test_a_rank_stops_is_inspected_and_stepped",
    ],
    "sampler": [
        "tests/ranks/core/test_leaks.py::test_the_sampler_ends_with_the_last_model",
    ],
    "an export": [
        "tests/cluster/test_export.py",
    ],
}


def compile_programs(system: Root) -> list[Path]:
    """Compiles the C++ test programs here, for there: their paths there."""
    folder, torch = VENV / "programs", system.site_packages / "torch"
    headers = [f"-isystem{system.within(torch) / 'include' / inner}" for inner in ("", "torch/csrc/api/include")]
    libraries = [f"-L{system.within(torch) / 'lib'}", f"-Wl,-rpath,{torch / 'lib'},--allow-shlib-undefined"]
    system.within(folder).mkdir(exist_ok=True)
    programs = [f"test_{name}" for name in [*NAMES, "shared_memory"]]
    for name in programs:
        unit = "".join(f'#include "{source}"\n' for source in (HERE / f"{name}.cpp", *SOURCES[name]))
        against = [*headers, *libraries, "-ltorch_cpu", "-lc10"] if name in WITH_TORCH else []
        command = [f"{ARCH}-linux-gnu-g++", *FLAGS, *VARIANTS["plain"], "-x", "c++", "-", *against]
        subprocess.run([*command, "-o", system.within(folder / name)], input=unit, text=True, check=True)
    return [folder / name for name in programs]


def install(system: Root, wheel: Path) -> None:
    """Installs what the wheel needs, and by pip the wheel."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    system.install(TORCH, *requirements(["", "notebooks"], project), *PACKAGES)
    shutil.copy(wheel, system.within(VENV))
    options = ["--quiet", "--no-index", "--no-deps", "--force-reinstall"]
    if system.run(VENV / "bin/pip", "install", *options, VENV / wheel.name) or system.run(VENV / "bin/pip", "check"):
        sys.exit(f"pip could not install {wheel.name} there")


def made_wheel() -> Path:
    """That of `make wheel`, for this Python."""
    subprocess.run(["make", "wheel", f"ARCH={ARCH}"], cwd=ROOT, check=True)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return max((ROOT / "dist").glob(f"*-{tag}-*_{ARCH}.whl"), key=lambda path: path.stat().st_mtime)


def prepared() -> Root:
    """The root, made if it is not there.

    Raises:
        Missing: it can't be had here.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if platform.machine() == ARCH:
        raise Missing(f"this machine is {ARCH} itself, `make test` tests it")
    if python not in SUITES:
        raise Missing(f"no release of Debian has this Python, {python}, for which the wheel is made")
    system = Root(ROOT / "build" / "emulated", python, ARCH)
    system.make()
    need(f"{ARCH}-linux-gnu-g++", f"g++-{ARCH}-linux-gnu")
    return system


def main(*given: str) -> int:
    """Makes all that is missing and runs everything; the exit code is 1 if something failed."""
    try:
        system = prepared()
    except Missing as reason:
        print(f"skipped: {reason}")
        return 0
    install(system, Path(given[0]) if given else made_wheel())
    system.copy_tree("ddp_lab/")  # so that the wheel's is tested
    failed = [program.name for program in compile_programs(system) if system.run(program) != 0]
    chosen = [one for tests in CLAIMS.values() for one in tests]
    words = ["-m", "pytest", *shlex.split(os.environ.get("PYTEST_ARGS", "")), *chosen]
    patience = os.environ.get("DDP_LAB_TEST_PATIENCE", "1")
    code = system.run(VENV / "bin/python", *words, cwd=TREE, DDP_LAB_TEST_PATIENCE=patience)
    print(f"C++ programs that failed on {ARCH}: {', '.join(failed) or 'none'}")
    return int(bool(failed) or code != 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
