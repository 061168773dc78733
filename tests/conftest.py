"""The tests leave the machine as they found it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ddp_lab.machine import no_collector
from ddp_lab.output import quick_nbformat
from tests import leftovers, unsteady
from tests.waiting import TEST_LIMIT_S

# Machines differ in speed: an example may take as long as it takes.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

leftovers.mark()
os.environ["DDP_LAB_EARLY"] = "0"  # most notebooks here start no cluster, or soon another one
# Some machines keep no bytecode: each of hundreds of processes would compile torch's source anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
quick_nbformat.install()  # else it takes two seconds in each worker
# A shell that starts the tests in the background lets them ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


_LEFT = "left_behind"  # of a worker, for the session that started it
_before = pytest.StashKey[leftovers.Belongings]()
_found = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make test` passes."""
    unsteady.add_option(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A temporary folder of its own for each of several workers: none finds what the others' clusters leave there."""
    if config.option.timeout is None:
        config.option.timeout = TEST_LIMIT_S
    config.stash[_found] = []
    if hasattr(config, "workerinput"):
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="ddp_lab_tests-")
        # After multiprocessing has removed its own folder there.
        util.Finalize(None, shutil.rmtree, [tempfile.tempdir], exitpriority=-200)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Notes what is there before the first test."""
    session.config.stash[_before] = leftovers.look()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Takes over what a worker has found when all its tests had ended."""
    node.config.stash[_found] += getattr(node, "workeroutput", {}).get(_LEFT, [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """The suite is red if a process, thread, socket, shared memory or a folder is left; then failures run again. If it
    is interrupted, what it has started ends."""
    config = session.config
    leftovers.end_tracker()
    if exitstatus == pytest.ExitCode.INTERRUPTED and not hasattr(config, "workeroutput"):
        leftovers.end_processes()
    more = leftovers.left_since(config.stash[_before])
    config.stash[_found] += [f"{kind}: {name}" for kind, names in more.items() for name in names]
    if hasattr(config, "workeroutput"):
        config.workeroutput[_LEFT] = config.stash[_found]
        return
    config.stash[_found] = list(dict.fromkeys([*config.stash[_found], *leftovers.left_by_workers()]))
    unsteady.run_again(session)
    if config.stash[_found]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Generator[None, None, None]:
    """Names what is left behind, and the tests that passed only when they ran again, right above the closing line: the
    end of a log shows them."""
    yield
    for name in config.stash[_found]:
        terminalreporter.write_line(f"LEFT BEHIND by the suite: {name}", red=True)
    unsteady.summarise(terminalreporter)


# Files that share what is dear to start: JupyterLab in Chromium, the executed quickstart, servers of torch's tests.
_TOGETHER = ("tests/browser/", r"tests/notebooks/test_(demo|quickstart|site)\.py", "tests/torch_suite/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file run in one worker, and so do those of files that share something dear."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            found = (together for together in _TOGETHER if re.match(together, nodeid))
            return next(found, super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Thousands of tests and torch's modules stay: the collector need not look at them."""
    with no_collector():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """torch's own tests come first: as the last, and the longest, they would keep one worker alone busy."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/torch_suite/"))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a process, thread, shared memory or folder; a folder's conftest asks for it for all."""
    yield from leftovers.nothing_more_than_before(sockets=False)


@pytest.fixture(scope="session")
def wheel() -> Path:
    """`make wheel`'s file."""
    root = Path(__file__).resolve().parents[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "TORCH"))}
    done = subprocess.run(["make", "wheel"], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (made,) = (root / "dist").glob(f"*-cp{sys.version_info[0]}{sys.version_info[1]}-*_{platform.machine()}.whl")
    assert made.stat().st_size < 15 << 20
    return made
