"""`ddp-lab doctor` says which rank waits where, and for whom, in jobs that were started without ddp_lab."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ddp_lab.cli import main
from ddp_lab.diagnosis.command import snapshot_job
from ddp_lab.diagnosis.report import HangReport
from ddp_lab.errors import DdpLabError
from tests import leftovers
from tests.waiting import wait_until

SCRIPT = Path(__file__).with_name("hanging_script.py")
soak = pytest.mark.soak


@contextlib.contextmanager
def _job(folder: Path, *arguments: str) -> Iterator[int]:
    """A job under torchrun; the id of its process."""
    ranks = "4" if arguments[0].startswith("mesh") else "2"
    options = ["--standalone", "--nproc-per-node", ranks, str(SCRIPT), *arguments]
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options],
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield job.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            for pid in [*leftovers.processes()]:
                if str(SCRIPT) in leftovers.processes().get(pid, ""):
                    os.kill(pid, signal.SIGKILL)


def _stuck(of: Sequence[str], words: Sequence[str], seconds: float = 1.0) -> HangReport:
    """The report once the doctor says these words; a job may still be starting."""

    def says() -> bool:
        try:
            found = snapshot_job(of, seconds)
        except DdpLabError as error:
            print(error)
            return False
        print(found.brief)
        reports.append(found)
        return found.diagnosis.stuck and all(re.search(word, found.brief) for word in words)

    reports: list[HangReport] = []
    wait_until(says, f"the doctor says {words}")
    return reports[-1]


def _free_port() -> str:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])


AT = rf"{re.escape(str(SCRIPT))}:\d+"


def test_a_job_that_waits(tmp_path: Path) -> None:
    """Torchrun's process is enough: py-spy reads the stacks of its ranks. Torch's debug server says the same with
    groups and numbers, and so do files of all ranks' Flight Recorders, with the lines that entered the collectives."""
    port, folder = _free_port(), tmp_path / "dumps"
    folder.mkdir()
    with _job(tmp_path, "alone", "serve_doctor", port, "dumps", str(folder)) as pid:
        _stuck([str(pid)], [rf"rank 0 waits in all_reduce \({AT}\)", "rank 1 is in .*sleep"])
        words = rf"rank 0 waits in all_reduce #1 of 32 B \(float32 \[2, 4\]\) \({AT}\)"
        _stuck([f"localhost:{port}"], [words, "rank 1 is in .*sleep"], seconds=0.2)
        _stuck([str(folder)], [rf"rank 0 waits in all_reduce #1 .* at {AT}", "rank 1 has recorded no"])


@soak
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("busy", [rf"rank 0 waits in the backward, for its collectives \({AT}\)", rf"rank 1 is in .*sleep.* at {AT}"]),
        ("calls", [rf"rank 0 is in all_reduce \({AT}\)", rf"rank 1 is in broadcast \({AT}\)"]),
        ("messages", [rf"rank 0 waits in recv at {AT}|each of ranks 0 and 1 waits in recv"]),
        ("loader", ["rank 0 waits in the backward", "rank 1 is waiting for data"]),
        ("checkpoint", [rf"rank 1 waits in barrier \({AT}\)", r"rank 0 is in .*open\("]),
        ("sharded", [r"rank 0 waits in .*all_gather|collective of FSDP", "rank 1 is in .*sleep"]),
        ("functional_call", [rf"rank 0 waits in .*\({AT}\)", "rank 1 is in .*sleep"]),
        ("objects", [rf"rank 0 waits in all_gather_object \({AT}\)", "rank 1 is in .*sleep"]),
        ("handle", [rf"rank 0 waits in a collective \({AT}\)", "rank 1 is in .*sleep"]),
        ("queue_of_its_own", ["rank 0 waits in all_reduce", "a thread or a queue of its own"]),
    ],
)
def test_processes(tmp_path: Path, case: str, words: list[str]) -> None:
    """The stacks of a job's processes tell other waits, too."""
    with _job(tmp_path, case) as pid:
        _stuck([str(pid)], words)


@soak
def test_debug_server(tmp_path: Path) -> None:
    """Torch's debug server does, also one that torch itself has started."""
    port = _free_port()
    with _job(tmp_path, "mesh", "start_debug_server", port):
        _stuck([f"localhost:{port}"], [r"on mesh dimension (dp|tp)", "rank 3 is in"], seconds=0.2)


@soak
def test_dumps(tmp_path: Path) -> None:
    """Files of all ranks' Flight Recorders do."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    with _job(tmp_path, "groups", "dumps", str(folder)):
        _stuck([str(folder)], [rf"different groups: .*on data .* at {AT}", "on tensor"])


@soak
def test_a_job_in_progress_is_not_stuck(tmp_path: Path) -> None:
    """Ranks that train wait for each other in each step, and nothing is said."""
    with _job(tmp_path, "trains") as pid:
        wait_until(lambda: (tmp_path / "trains").exists(), "the job trains")
        for _ in range(5):
            report = snapshot_job([str(pid)], 1.0)
            assert not report.diagnosis.stuck, str(report)


def _told(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str, str]:
    """The exit code of `ddp-lab doctor`, its output and its errors."""
    try:
        code = main.main(["doctor", *given])
    except SystemExit as end:
        code = int(str(end.code))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 with the reason, if there is nothing to examine. `--json` prints a report as data; dumps of a job in
    which nothing is in flight are exit code 0."""
    for given, words in {
        (str(tmp_path),): "holds no dump of a Flight Recorder",
        ("localhost:1",): "no debug server answers at localhost:1",
        ("99999999",): "there is no process 99999999",
        (str(os.getpid()), "somewhere"): "'somewhere' is not a file or folder, HOST:PORT or a process id",
        (): "the following arguments are required: JOB",
    }.items():
        code, out, errors = _told(capsys, *given)
        assert (code, words in errors, out) == (2, True, ""), errors
    for rank in (0, 1):
        (tmp_path / f"trace_{rank}").write_text(json.dumps({"version": "2.10", "entries": []}))
    code, out, errors = _told(capsys, "--json", str(tmp_path))
    assert code == 0, errors
    assert (json.loads(out)["stuck"], [one["rank"] for one in json.loads(out)["ranks"]]) == (False, [0, 1])


def test_another_server() -> None:
    """What answers but is not torch's debug server is said to be none."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}" if "json" in self.path else b"<h1>Hello</h1>")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.HTTPServer(("localhost", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(DdpLabError, match="answers, but not as torch's debug server does"):
            snapshot_job([f"localhost:{server.server_port}"], 0.1)
        server.shutdown()
