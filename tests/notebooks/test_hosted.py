"""The notebook for hosted services: here, and in a container that has what such a service has before it is opened."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import torch

from tests.notebooks import running
from tests.notebooks.restricted import PYTHON, Container, container, why_not
from tests.notebooks.test_restricted import SCRIPT

HOSTED = running.PROJECT / "notebooks" / "hosted.ipynb"
_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
_TORCH = "import importlib.metadata; print(importlib.metadata.version('torch'))"
# A kernel older than ddp_lab needs, like Colab's, with what runs a notebook without a browser.
OLD_KERNEL = ("ipykernel==6.17.1", "ipython==7.34.0", "ipywidgets==7.7.1", "nbclient", "pandas<3")


def with_wheel(wheel: str) -> running.Notebook:
    """The notebook after a reader has filled in WHEEL."""
    notebook = running.read(HOSTED)
    install = running.cell(notebook, "install")
    install.source, found = re.subn(r'^WHEEL = ""', f"WHEEL = {wheel!r}", install.source)
    assert found == 1
    return notebook


def judge(executed: running.Notebook) -> None:
    """Asserts that both ranks trained, and that their timeline is seen with widgets and without."""
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", running.text(running.cell(executed, "train")))]
    assert losses[-1] < losses[0] / 2
    dashboard = running.cell(executed, "dashboard")
    assert running.WIDGET in running.mime_types(dashboard)
    pages = [output.data.get("text/html", "") for output in dashboard.outputs]
    assert any('alt="Sequential on 2 ranks' in page for page in pages), "the picture was replaced after the training"
    assert len(running.figure(running.cell(executed, "figure"))["data"]) >= 3
    assert "Sequential on 2 ranks, steps " in running.text(running.cell(executed, "summary"))


def test_it_runs_where_ddp_lab_is_installed(tmp_path: Path) -> None:
    """Without a wheel it installs nothing, and trains."""
    judge(running.execute(running.read(HOSTED), tmp_path))


@pytest.fixture(scope="module")
def host(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """With a torch and an old kernel; the wheel is uploaded, but not installed."""
    with container(tmp_path_factory.mktemp("host") / "container") as made:
        made.install_torch(torch.__version__.split("+")[0])
        made.call(PYTHON, "-m", "pip", "install", "--quiet", *OLD_KERNEL)
        shutil.copy(wheel, made.work)
        yield made


@pytest.mark.soak
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_script_runs_beside_an_old_kernel(host: Container, wheel: Path) -> None:
    """In an environment of its own, as the page on Colab has it, a script is recorded; the host's packages stay."""
    before = host.call(PYTHON, "-m", "pip", "freeze")
    host.call(PYTHON, "-m", "venv", "--without-pip", "lab")
    [packages] = (host.work / "lab").glob("lib/*/site-packages")
    # The host's Python is an environment here, so --system-site-packages would not mean its packages.
    (packages / "host.pth").write_text(host.call(PYTHON, "-c", _PACKAGES))
    host.call(PYTHON, "-m", "pip", "--python", "lab/bin/python", "install", "--quiet", wheel.name)
    (host.work / "train.py").write_text(SCRIPT)
    command = ["lab/bin/ddp-lab", "run", "--standalone", "--nproc-per-node", "2", "--report", "report.html", "train.py"]
    host.call(*command)
    page = (host.work / "report.html").read_text(encoding="utf-8")
    assert "Linear on 2 ranks" in page
    assert host.call(PYTHON, "-m", "pip", "freeze") == before


@pytest.mark.soak
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_host_is_told_what_to_do(host: Container, wheel: Path) -> None:
    """Without a wheel, with a wrong path, and after pip replaced the kernel, the error says what to do. Then it trains.

    The torch that was there stays.
    """

    def failure(path: str) -> str:
        nbformat.write(with_wheel(path), host.work / "hosted.ipynb")
        done = host.run("/srv/venv/bin/jupyter-execute", "hosted.ipynb")
        assert done.returncode != 0
        return done.stdout + done.stderr

    before = host.call(PYTHON, "-c", _TORCH)
    assert "ddp_lab is not installed: write the path or the URL of its wheel into WHEEL" in failure("")
    assert "missing.whl does not exist: upload the wheel" in failure("missing.whl")
    restart = failure(wheel.name)
    assert re.search(r"pip replaced .*ipykernel.*: restart this session, then run all cells again", restart)
    host.call("/srv/venv/bin/jupyter-execute", "--timeout=200", "--inplace", "hosted.ipynb")
    judge(running.read(host.work / "hosted.ipynb"))
    assert host.call(PYTHON, "-c", _TORCH) == before
