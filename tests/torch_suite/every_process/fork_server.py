"""Imports torch's tests once and forks a process for each test that is asked for.

Each line on stdin is a JSON object: ``test`` (Class::name), ``log``, ``marks`` and ``result`` (paths). Each line on
stdout is one too: ``ready``, ``pid`` of the test's process (the leader of a session of its own, so that everything it
starts can be ended with it), ``ended``. The result is a file with a JSON object: ``outcome`` (passed, failed, skipped,
missing) and ``text``. At SIGUSR1 the test's process and those forked from it each write their stacks to a file of their
own, ``LOG.stacks.PID``: in one file they would run into each other.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import sys
import traceback
import unittest
from multiprocessing import get_context
from typing import Any


def main() -> None:
    import collected

    if os.environ["DDP_LAB_SUITE_START"] == "fork":
        _fork_ranks()
    _say(ready=os.getpid())
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_the_test(request, collected)
        _say(pid=pid)
        os.waitpid(pid, 0)
        _say(ended=pid)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _fork_ranks() -> None:
    """torch's tests start their ranks with `spawn`, each of which imports torch: five times as slow as a fork."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def fork(self: Any) -> None:
        self._start_processes(get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = fork  # type: ignore[method-assign]


def _be_the_test(request: dict[str, str], collected: Any) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["DDP_LAB_SUITE_MARKS"] = request["marks"]
    os.register_at_fork(after_in_child=functools.partial(_write_stacks_to, request["log"]))
    _write_stacks_to(request["log"])
    try:
        outcome, text = _run(request["test"], collected)
    except BaseException:  # noqa: BLE001 - it is the test's result
        outcome, text = "failed", traceback.format_exc()
    with open(request["result"] + ".part", "w") as file:
        json.dump({"outcome": outcome, "text": text}, file)
    os.rename(request["result"] + ".part", request["result"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _write_stacks_to(log: str) -> None:
    stacks = os.open(f"{log}.stacks.{os.getpid()}", os.O_WRONLY | os.O_CREAT)  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, stacks)


def _run(test: str, collected: Any) -> tuple[str, str]:
    cls, _, name = test.partition("::")
    if not hasattr(getattr(collected, cls, None), name):
        return "missing", f"this release of torch has no {test}"
    result = unittest.TestResult()
    unittest.TestSuite([getattr(collected, cls)(name)]).run(result)
    wrong = [text for _, text in result.failures + result.errors]
    if wrong or result.unexpectedSuccesses:
        return "failed", "\n".join(wrong) or "passed, where torch expects a failure"
    if result.skipped or result.expectedFailures:
        return "skipped", "; ".join(reason for _, reason in result.skipped) or "an expected failure"
    return ("passed", "") if result.testsRun == 1 else ("failed", f"{result.testsRun} tests ran")


if __name__ == "__main__":
    main()
