"""The wheel in a container as hosted notebooks have it: no compiler, 64 MiB in /dev/shm, no ptrace, home read-only."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import torch

from tests.notebooks import running
from tests.notebooks.judging import Wrong, answered
from tests.notebooks.restricted import PYTHON, REFUSED, Container, container, why_not

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

LESSONS = "ddp_lab_lessons/tutorials"

_PORTS = (
    "other users of this machine can connect to the ports of torch's store and Gloo: the kernel refused a filter "
    "(Operation not permitted). See SECURITY.md"
)

_FILTER = """
import ctypes, socket, struct
program = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
with socket.create_server(("127.0.0.1", 0)) as server:
    try:
        server.setsockopt(socket.SOL_SOCKET, 26, struct.pack("@HP", 1, ctypes.addressof(program)))
    except PermissionError:
        print("refused")
"""

RESTRICTIONS = """
import ctypes, errno, json, os, shutil
libc = ctypes.CDLL(None, use_errno=True)

def refused(number):
    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1
    return ctypes.get_errno() == errno.EPERM

def writable(folder):
    try:
        open(os.path.join(folder, "probe"), "w").close()
    except OSError:
        return False
    return True

tools = ("gcc", "g++", "cc", "c++", "clang", "ld", "as", "make", "cmake", "ninja", "nvcc")
shm = os.statvfs("/dev/shm")
print(json.dumps({
    "programs": [name for name in tools if shutil.which(name)],
    "shm": shm.f_blocks * shm.f_frsize,
    "refused": [refused(number) for number in (101, 310, 311)],
    "process": os.getpid(),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "home": writable(os.path.expanduser("~")),
    "work": writable("."),
    "cores": len(os.sched_getaffinity(0)),
    "rights": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")),
}))
"""

SHARED_MEMORY = """
import os
import ddp_lab

CALL = '''
import os
import warnings
import ddp_lab.comm
got = {}
for size in (1 << 10, 1 << 20, 25 << 20, 200 << 20):
    mine = torch.full((size // 4,), rank + 1.0)
    dist.all_reduce(mine)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, torch.full((size // 4,), float(rank)))
    got[size] = [mine[-1].item(), [each[-1].item() for each in gathered]]
'''

if __name__ == "__main__":
    with ddp_lab.Cluster(2, backend="shm") as lab:
        lab.run(CALL)
        assert lab.pull("dist.get_backend()") == {0: "shm", 1: "shm"}
        for got in lab.pull("got").values():
            assert list(got.values()) == [[3.0, [0.0, 1.0]]] * 4, got
        used = os.statvfs("/dev/shm")
        assert used.f_bfree == used.f_blocks, "something lies in /dev/shm"
    print("collectives of 1 KiB to 200 MiB")
"""

LOADERS = """
import ddp_lab

CELL = '''
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(64, 1).repeat(1, {width}))
loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
total = sum(float(batch[:, 0].sum()) for (batch,) in loader)
'''

if __name__ == "__main__":
    with ddp_lab.Cluster(2) as lab:
        lab.run(CELL.format(width=1000))
        assert set(lab.pull("total").values()) == {2016.0}
        try:
            lab.run(CELL.format(width=8 << 20))  # batches of 128 MiB
        except ddp_lab.CellError as error:
            print(error)
        assert lab.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}
"""

DOCTOR = """
import ddp_lab

if __name__ == "__main__":
    with ddp_lab.Cluster(2, hang_seconds=None) as lab:
        hanging = lab.run("import time\\nif rank == 0: dist.all_reduce(torch.ones(1))", wait=False)
        report = lab.doctor()
        while not report.diagnosis.stuck:
            report = lab.doctor()
        print(report)
        lab.interrupt()
        assert lab.run("x = torch.ones(1); dist.all_reduce(x); x.item()").values == {0: 2.0, 1: 2.0}
"""

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1000, 1000))
for _ in range(5):
    model(torch.ones(8, 1000)).sum().backward()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosted(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """With torch from the beginning, the wheel installed by pip, and the lessons that it ships."""
    with container(tmp_path_factory.mktemp("restricted") / "container") as made:
        made.install_torch(torch.__version__.split("+")[0])
        shutil.copy(wheel, made.work)
        made.call(PYTHON, "-m", "pip", "install", "--quiet", f"./{wheel.name}[notebooks]")
        made.call(
            PYTHON,
            "-c",
            "from ddp_lab import lesson_files; from pathlib import Path; lesson_files.working_copy(Path.cwd())",
        )
        yield made


@pytest.fixture(autouse=True)
def nothing_left_there(hosted: Container) -> Iterator[None]:
    """Fails if a cluster's folder is left in its /tmp, or one of its processes was killed because memory ran out."""
    yield
    assert [path.name for path in hosted.tmp.glob("ddp_lab-*")] == []
    assert not hosted.killed_for_memory()


def program(hosted: Container, text: str, refused: tuple[str, ...] = REFUSED) -> str:
    """What a program says, on stdout and on stderr."""
    (hosted.work / "program.py").write_text(text)
    done = hosted.run(PYTHON, "program.py", refused=refused)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_container_is_what_it_says(hosted: Container) -> None:
    """All that hosted notebooks lack is missing."""
    assert json.loads(program(hosted, RESTRICTIONS)) == {
        "programs": [],
        "shm": 64 << 20,
        "refused": [True, True, True],
        "process": 1,
        "processes": 1,
        "home": False,
        "work": True,
        "cores": 2,
        "rights": "0" * 16,
    }


def test_collectives_of_any_size(hosted: Container) -> None:
    """Shared memory takes nothing of /dev/shm, and holds more than it could."""
    assert "collectives of 1 KiB to 200 MiB" in program(hosted, SHARED_MEMORY)


def test_what_falls_back_says_so(hosted: Container) -> None:
    """Where the kernel gives neither anonymous memory nor handles of processes, one line says what is done instead; so
    it does of ports, on which some kernels let nobody without rights put a filter."""
    command = ["/srv/venv/bin/ddp-lab", "check-install", "--json"]
    usual = {one["name"]: one for one in json.loads(hosted.call(*command))["checks"]}
    refuses = hosted.call(PYTHON, "-c", _FILTER).strip() == "refused"
    assert usual["cluster"]["state"] == ("warning" if refuses else "ok")
    assert usual["cluster"]["found"].partition("; but ")[2] == (_PORTS if refuses else "")
    assert (usual["/dev/shm"]["state"], usual["/dev/shm"]["found"]) == ("warning", "64 of 64 MiB free")
    assert "num_workers=0" in usual["/dev/shm"]["remedy"]
    refused = (*REFUSED, "memfd_create", "pidfd_open")
    cluster = {one["name"]: one for one in json.loads(hosted.call(*command, refused=refused))["checks"]}["cluster"]
    assert cluster["state"] == "warning"
    told = cluster["found"].partition("; but ")[2].replace(f"{_PORTS}; ", "").replace(f"; {_PORTS}", "")
    memory, arrays = told.split("; large arrays")
    assert memory.startswith("shm: rank 0 can't create shared memory: memfd_create: Operation not permitted")
    assert memory.endswith("this group's memory is in /dev/shm, and its tensors are copied")
    assert "travel in messages" in arrays


def test_the_doctor_needs_no_debugger(hosted: Container) -> None:
    """It names who waits, and the line of the cell."""
    said = program(hosted, DOCTOR)
    assert "rank 1 has finished the cell; rank 0 still waits in all_reduce #" in said


def test_data_loaders(hosted: Container) -> None:
    """Small batches come; too large ones end in an error that names shared memory, and the ranks live on."""
    assert "worker process 0: unable to allocate shared memory" in program(hosted, LOADERS)


def test_a_script_is_recorded(hosted: Container) -> None:
    """`ddp-lab run` trains, reports and writes its page."""
    (hosted.work / "train.py").write_text(SCRIPT)
    command = ["/srv/venv/bin/ddp-lab", "run", "--standalone", "--nproc-per-node", "2", "train.py"]
    assert "report.html" in hosted.call(*command)


@pytest.mark.parametrize("lesson", [path.stem for path in running.LESSONS])
def test_lesson(hosted: Container, lesson: str) -> None:
    """As it is, with wrong answers and solutions: whatever its own tests say of it outside holds here."""
    module = importlib.import_module(f"tests.notebooks.test_{running.module_of(lesson)}")
    done = executed(hosted, lesson, module.WRONG)
    tests = [each for name, each in vars(module).items() if name.startswith("test_")]
    mine = [each for each in tests if list(inspect.signature(each).parameters) == ["lesson"]]
    assert mine
    for each in mine:
        each(done)


def executed(hosted: Container, lesson: str, wrong: Wrong) -> running.Notebook:
    """The lesson after "Run all" in the container, beside the copies that a reader has there."""
    notebook = answered(lesson, wrong)
    notebook.cells.append(nbformat.v4.new_code_cell("import ddp_lab\nprint(ddp_lab.__file__)", id="whose"))
    nbformat.write(notebook, hosted.work / LESSONS / "answered.ipynb")
    hosted.call("/srv/venv/bin/jupyter-execute", "--timeout=200", "--inplace", f"{LESSONS}/answered.ipynb")
    done = running.read(hosted.work / LESSONS / "answered.ipynb")
    assert running.text(running.cell(done, "whose")).startswith("/srv/venv/lib/")
    return done
