"""The project installs from what it ships, in an environment that has nothing of it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from ddp_lab import lesson_files

ROOT = Path(__file__).resolve().parents[2]

SMOKE = """
import torch, ddp_lab, ddp_lab._schedule
import torch.distributed as dist
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = ddp_lab.DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.ones(1, 3)).sum().backward()
assert torch.equal(model.module.weight.grad, torch.ones(2, 3))
dist.destroy_process_group()
print("works with torch", torch.__version__)
"""


CLUSTER = """
import sys
from pathlib import Path
import ddp_lab
from ddp_lab import lesson_files

TRAIN = "model = ddp_lab.DistributedDataParallel(torch.nn.Linear(3, 2))\\n"
TRAIN += "model(torch.ones(1, 3) * (rank + 1)).sum().backward()\\n"
TRAIN += "float(model.module.weight.grad.mean())"
if __name__ == "__main__":
    with ddp_lab.Cluster(2) as lab:
        assert lab.run(TRAIN).values == {0: 1.5, 1: 1.5}
    assert not (Path(ddp_lab.__file__).parents[1] / "csrc").exists()
    assert (lesson_files.working_copy(Path.cwd()) / "tutorials" / "01_ranks_and_cells.ipynb").exists()
    for installed in ("labextensions/ddp_lab/package.json", "kernels/ddp_lab/kernel.json"):
        assert (Path(sys.prefix) / "share/jupyter" / installed).exists()
    print("averaged on two ranks")
"""


# What a JupyterLab of the environment loads.
_LAB_EXTENSIONS = """
from jupyter_core.paths import jupyter_path
from jupyterlab_server.config import get_federated_extensions
extensions = get_federated_extensions(jupyter_path("labextensions"))
""".strip()


MPI = """
import os, runpy, setuptools, sys
setuptools.setup = lambda **given: None
os.environ["MPICXX"] = sys.argv[1]
print(runpy.run_path("setup.py")["mpi_definitions"]())
"""


def call(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Runs a command that must succeed, returns what it printed; `path`: the one folder that programs are found in."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "TORCH"))}
    if path is not None:
        environment["PATH"] = str(path)
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution built from this tree."""
    out = tmp_path_factory.mktemp("sdist")
    call(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, cwd=ROOT)
    (made,) = out.glob("*.tar.gz")
    return made


def clean_environment(folder: Path) -> Path:
    """Makes a virtual environment with nothing but pip and returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", cwd=folder)
    return python


def test_the_source_distribution_holds_what_a_build_needs(sdist: Path) -> None:
    """Sources, headers, the build backend and the widgets' front end are in the archive, no binary is."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.*") if p.suffix in (".h", ".cpp", ".py", ".txt")
    }
    expected |= {str(p.relative_to(ROOT)) for p in (ROOT / "ddp_lab").rglob("*.js")}
    expected |= {"pyproject.toml", "setup.py", "LICENSE", "README.md", "ddp_lab/py.typed"}
    assert expected - names == set()
    assert [name for name in names if name.endswith(".so")] == []


def test_only_our_notebooks_are_installed(tmp_path: Path) -> None:
    """All lessons and notebooks, and what they need, go into a wheel; one that a reader has made does not."""
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    listed = call("git", "ls-files", cwd=ROOT).splitlines()
    for name in listed:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    ours = {Path(name) for name in listed if name.endswith(".ipynb")}
    for folder in lesson_files.FOLDERS:
        shutil.copy(tree / lesson_files.QUICKSTART, tree / folder / "Untitled.ipynb")
    call(sys.executable, "setup.py", "--quiet", "install_data", "--install-dir", installed, cwd=tree)
    share = installed / "share" / "ddp_lab"
    assert {path.relative_to(share) for path in share.glob("*/*.ipynb")} == ours
    beside = ("notebooks/paper/", *(f"tutorials/{folder}/" for folder in ("checks", "images", "recordings")))
    needed = {Path(name) for name in listed if name.startswith(beside)}
    found = [*share.glob("notebooks/paper/*"), *share.glob("tutorials/*/*")]
    assert {path.relative_to(share) for path in found} == needed


def test_mpi_is_built_when_it_is_asked_for(tmp_path: Path) -> None:
    """Without MPICXX nothing of MPI is built; MPICH's wrapper is understood; one without mpi.h ends with the remedy."""
    include = tmp_path / "mpi"
    include.mkdir()
    (include / "mpi.h").touch()
    told = f"g++ -I{include} -L/mpi/lib -lmpichcxx -lmpich"
    wrapper, without = tmp_path / "mpicxx", tmp_path / "broken"
    wrapper.write_text(f'#!/bin/sh\ncase "$1" in -*_info) echo "{told}" ;; *) exit 1 ;; esac\n')
    without.write_text("#!/bin/sh\necho -I/nowhere\n")
    for each in (wrapper, without):
        each.chmod(0o755)
    assert ast.literal_eval(call(sys.executable, "-c", MPI, "", cwd=ROOT)) == []
    found = ast.literal_eval(call(sys.executable, "-c", MPI, wrapper, cwd=ROOT))
    assert found == [f"-DMPI_INCLUDES={include}", "-DMPI_LIBRARIES=-L/mpi/lib;-lmpich"]
    for missing in (without, tmp_path / "nothing"):
        done = subprocess.run(
            [sys.executable, "-c", MPI, missing], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "apt install libopenmpi-dev" in done.stderr


ELSEWHERE = """
import sys
sys.path.insert(0, "csrc")
import build_backend
sys.platform = sys.argv[1]
build_backend.get_requires_for_build_wheel()
"""


@pytest.mark.parametrize(
    ("system", "told_by_uname", "command"),
    [
        ("darwin", "Darwin", "docker compose --file containers/compose.yaml up"),
        ("win32", "MINGW64_NT-10.0", "make demo"),
    ],
)
def test_other_systems_are_told_what_runs_there(system: str, told_by_uname: str, command: str, tmp_path: Path) -> None:
    """`pip install` and `make demo` end with the same two lines, what is missing and a command; no torch is fetched."""
    uname = tmp_path / "uname"
    uname.write_text(f"#!/bin/sh\necho {told_by_uname}\n")
    uname.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    make = ["make", "--silent", "demo", f"VENV={tmp_path / 'venv'}"]
    made = subprocess.run(make, cwd=ROOT, env=path, capture_output=True, text=True, check=False)
    pip = [sys.executable, "-c", ELSEWHERE, system]
    asked = subprocess.run(pip, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert asked.returncode != 0
    assert asked.stderr == made.stdout
    missing, remedy = made.stdout.splitlines()
    assert missing.startswith("missing Linux")
    assert remedy.endswith(command)


def test_what_a_machine_can_build_for() -> None:
    """Another architecture needs its compiler, which the error names; a Python is known by its name in file names."""
    asked = {**os.environ, "DDP_LAB_ARCH": "m68k"}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=ROOT, env=asked, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "apt install g++-m68k-linux-gnu" in done.stderr
    target = call(sys.executable, "-c", TARGET, sys.executable, cwd=ROOT)
    assert target == f"Python {sys.version_info[0]}.{sys.version_info[1]} on aarch64\n"


TARGET = """
import sys
sys.path.insert(0, "csrc")
import make_wheel
print(make_wheel.Target.of(sys.argv[1], "aarch64"))
"""


ADD_DOCS = """
import sys
from pathlib import Path
sys.path.insert(0, "csrc")
import make_wheel
make_wheel.add_docs(Path(sys.argv[1]), Path(sys.argv[2]))
"""


PROBE_PYPROJECT = """
[build-system]
requires = []
build-backend = "setuptools.build_meta"
[project]
name = "ddp-lab-probe"
version = "1.0"
"""


def build_probe(folder: Path) -> Path:
    """Builds the wheel of a project without contents; returns its folder."""
    (folder / "probe").mkdir()
    (folder / "probe" / "pyproject.toml").write_text(PROBE_PYPROJECT)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    call(sys.executable, "-c", build, folder / "wheels", cwd=folder / "probe")
    return folder / "wheels"


@pytest.mark.parametrize("installer", ["uv", pytest.param("pip", marks=pytest.mark.soak)])
def test_a_wheel_with_the_site_comes_from_where_pip_is_told(tmp_path: Path, installer: str) -> None:
    """A wheel in a folder that only PIP_FIND_LINKS names is installed, without an index, by uv or else by pip.

    Pages that were put into it are installed where `ddp-lab docs` finds them, and the wheel stays one.
    """
    (wheel,) = build_probe(tmp_path).glob("*.whl")
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    for name in ("index.html", "guide/dashboard.html"):
        (tmp_path / "docs" / name).write_text(name)
    call(sys.executable, "-c", ADD_DOCS, wheel, tmp_path / "docs", cwd=ROOT)
    assert [*wheel.parent.iterdir()] == [wheel]
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    if installer == "uv":
        shutil.copy(Path(sys.executable).parent / "uv", environment / "bin" / "uv")
    told = {"PIP_FIND_LINKS": str(wheel.parent), "PIP_NO_INDEX": "1"}
    install = [python, ROOT / "csrc" / "install.py", "ddp-lab-probe==1.0"]
    done = subprocess.run(install, env={**os.environ, **told}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("uv can't be had here" in done.stdout) == (installer == "pip")
    find = (
        f"import sys; sys.path.append({str(ROOT)!r}); from ddp_lab import documentation as d; print(d._FOLDERS[-1]);"
        " import importlib.metadata as m; print(m.version('ddp-lab-probe'))"
    )
    folder, version = call(python, "-c", find, cwd=tmp_path).splitlines()
    assert version == "1.0"
    assert (Path(folder) / "guide" / "dashboard.html").read_text() == "guide/dashboard.html"
    (record,) = environment.glob("lib/*/site-packages/ddp_lab_probe-1.0.dist-info/INSTALLER")
    assert record.read_text().strip() == installer


@pytest.mark.soak
@pytest.mark.parametrize("isolated", [True, False])
def test_installs_from_the_source_distribution(sdist: Path, tmp_path: Path, isolated: bool) -> None:
    """`pip install ddp_lab.tar.gz` in a clean environment gives a working package, for the torch that was there; with
    `--no-build-isolation` it is built against the torch of the environment itself."""
    import torch

    python = clean_environment(tmp_path / "venv")
    tools = [] if isolated else ["setuptools>=77", "wheel", "cmake>=3.25", "ninja"]
    install = [python, "-m", "pip", "install", "--quiet"]
    call(*install, f"torch=={torch.__version__.split('+')[0]}", *tools, cwd=tmp_path)
    call(*install, *([] if isolated else ["--no-build-isolation"]), sdist, cwd=tmp_path)
    assert f"works with torch {torch.__version__}" in call(python, "-c", SMOKE, cwd=tmp_path)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no g++-aarch64-linux-gnu")
def test_a_wheel_for_another_processor() -> None:
    """`make wheel ARCH=aarch64` writes a wheel for manylinux_2_28_aarch64; all that it loads is for aarch64."""
    call("make", "wheel", "ARCH=aarch64", cwd=ROOT)
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    (made,) = (ROOT / "dist").glob(f"*-{python}-*manylinux_2_28_aarch64.whl")
    assert made.stat().st_size < 15 << 20
    with zipfile.ZipFile(made) as files:
        machines = [files.read(name)[18:20] for name in files.namelist() if name.endswith(".so")]
    assert len(machines) > 1
    assert set(machines) == {(183).to_bytes(2, "little")}  # EM_AARCH64


@pytest.mark.soak
@pytest.mark.parametrize("release", ["2.13.0", "2.14.1", "2.15.0"])  # a build for CPU where there is one, else for CUDA
def test_a_wheel_needs_no_compiler(wheel: Path, release: str, tmp_path: Path) -> None:
    """Beside any torch, where no program but Python is found: ranks train, and the lessons are there."""
    python = clean_environment(tmp_path / "venv")
    alone = python.parent
    shutil.copy(Path(sys.executable).parent / "uv", alone / "uv")
    install = [python, ROOT / "csrc" / "install.py", f"torch=={release}", f"{wheel}[notebooks]"]
    unconstrained = {**os.environ, "UV_CONSTRAINT": ""}
    done = subprocess.run(install, env=unconstrained, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (alone / "uv").unlink()
    assert f"works with torch {release}" in call(python, "-c", SMOKE, cwd=tmp_path, path=alone)
    (tmp_path / "smoke.py").write_text(CLUSTER)
    assert "averaged on two ranks" in call(python, "smoke.py", cwd=tmp_path, path=alone)
    found = call(python, "-m", "ddp_lab", "check-install", "--json", cwd=tmp_path, path=alone)
    assert {one["name"]: one["state"] for one in json.loads(found)["checks"]}["JupyterLab"] == "ok", found
    page = call(python, "-m", "ddp_lab", "docs", "troubleshooting#firewall", "--print", cwd=tmp_path, path=alone)
    assert Path(page.strip()).is_relative_to(tmp_path / "venv" / "share")
    seen = f"{_LAB_EXTENSIONS}\nprint('ddp_lab' in extensions)"
    assert call(python, "-c", seen, cwd=tmp_path, path=alone).split() == ["True"]


@pytest.mark.soak
def test_recordings_open_where_there_is_no_torch(tmp_path: Path) -> None:
    """With the other dependencies alone a recording is shown, replayed, diagnosed and reported."""
    from tests.unit.timeline.test_player import WITHOUT_TORCH

    program = (
        "import importlib.metadata as m; print(*(i for i in m.requires('ddp_lab') if 'extra' not in i), sep='\\n')"
    )
    needed = call(sys.executable, "-c", program, cwd=ROOT).splitlines()
    python = clean_environment(tmp_path / "venv")
    call(python, "-m", "pip", "install", "--quiet", *(one for one in needed if "torch" not in one), cwd=tmp_path)
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    Path(site, "ddp_lab").symlink_to(ROOT / "ddp_lab")  # a wheel would ask for torch
    recording = ROOT / "tutorials" / "recordings" / "run-1.npz"
    shutil.copy(recording, tmp_path / "run.npz")
    assert call(python, "-c", WITHOUT_TORCH, cwd=tmp_path).startswith("Rank 2 falls behind")
    assert "absent" in call(
        python, "-c", "import importlib.util as u; print(u.find_spec('torch') or 'absent')", cwd=tmp_path
    )
    page = tmp_path / "run.html"
    assert "wrote" in call(python, "-m", "ddp_lab", "report", recording, "--output", page, cwd=tmp_path)
    assert "Rank 2 falls behind" in page.read_text()
