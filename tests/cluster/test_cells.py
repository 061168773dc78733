"""Cells on real ranks: what runs, what comes back, how it fails; much output, and progress bars."""

from __future__ import annotations

import re
import signal
import stat
from pathlib import Path
from typing import Any

import numpy
import pytest

from ddp_lab import CellError
from ddp_lab.cluster.cells.results import RemoteValue
from ddp_lab.output.board import OutputBoard, SilentBoard
from ddp_lab.output.terminal import plain
from tests.cluster.conftest import Lab
from tests.cluster.hanging import held
from tests.cluster.pages import Page
from tests.waiting import wait_until


def page_of(lab: Lab, code: Any, **options: Any) -> str:
    """The text that a notebook shows for a cell."""
    page = Page()
    lab.run(code, board=OutputBoard(page), **options)
    return page.text


def failure(lab: Lab, code: Any, **options: Any) -> CellError:
    """The error of a cell that must fail."""
    with pytest.raises(CellError) as caught:
        lab.run(code, **options)
    return caught.value


def test_no_output_is_lost(lab: Lab) -> None:
    """Fifty cells that print and end at once all have their text, and the values of both ranks."""
    for number in range(50):
        result = lab.run(f"print('line', {number}); rank + {number}")
        assert [result.text(rank) for rank in (0, 1)] == [f"line {number}\n{number + rank}\n" for rank in (0, 1)]
        assert result.values == {0: number, 1: number + 1}


def test_ranks_keep_no_outputs(lab: Lab) -> None:
    """What a rank prints, displays and raises goes to the client; IPython would keep all of it there, too."""
    lab.run("print('x' * 1000); display(1); 2")
    with pytest.raises(CellError):
        lab.run("raise ValueError")
    lab.run("history = get_ipython().history_manager")
    assert lab.values("dict(history.outputs), dict(history.exceptions)") == {0: ({}, {}), 1: ({}, {})}


def test_cells_are_ipython_cells(lab: Lab) -> None:
    """Magics, shell commands, top-level await, `_` and the shell's events work on the ranks."""
    lab.run("ended = []\nget_ipython().events.register('post_run_cell', lambda result: ended.append(result.success))")
    result = lab.run("!echo from the shell\n%env DDP_LAB_CELL=7\nimport asyncio\nawait asyncio.sleep(0)\n6 * 7")
    assert "from the shell" in result.text(0)
    assert result.values == {0: 42, 1: 42}
    assert lab.values("import os; (_, os.environ['DDP_LAB_CELL'], list(ended))") == {
        rank: (42, "7", [True, True]) for rank in (0, 1)
    }


def test_tasks_live_on_between_cells(lab: Lab) -> None:
    """A task that one cell began is awaited in the next."""
    lab.run(
        "import asyncio\nasync def answer(): return 42\nawait asyncio.sleep(0)\nbegun = asyncio.create_task(answer())"
    )
    assert lab.values("await begun") == {0: 42, 1: 42}


def test_rich_outputs_arrive_as_such(lab: Lab) -> None:
    """A figure and a table come with their mime bundles, equal ones once."""
    page = Page()
    code = (
        "import matplotlib.pyplot as plt, pandas\nplt.plot([1, 2])\nplt.show()\n"
        "from IPython.display import HTML, display\ndisplay(pandas.DataFrame({'a': [1]}))\nHTML(f'<b>{rank}</b>')"
    )
    result = lab.run(code, board=OutputBoard(page))
    assert {rank: value.kind for rank, value in result.values.items()} == {0: "HTML", 1: "HTML"}
    bundles = [data for key, data in page.blocks.items() if key.endswith("rich")]
    own = [data["text/html"] for data in bundles if "<b>" in data.get("text/html", "")]
    assert sorted(own) == ["<b>0</b>", "<b>1</b>"]
    assert sum("image/png" in data for data in bundles) == 1
    assert sum("dataframe" in data.get("text/html", "") for data in bundles) == 1
    assert "ranks 0–1 ▾" in page.text


def test_long_cells(lab: Lab) -> None:
    """A cell of 2,000 lines runs, and its error names its last line."""
    assert lab.values("\n".join(["n = 0", *["n += 1"] * 2_000, "n"])) == {0: 2_000, 1: 2_000}
    error = failure(lab, "\n".join(["n = 0"] * 2_000 + ["n / 0"]))
    assert "line 2001" in plain(error.report)


def test_values(lab: Lab) -> None:
    """Plain values and small tensors come back, tensors as numpy arrays; what is large or foreign stays, named."""
    values = lab.values("(rank, 'text', [1.5, None], {'t': torch.arange(3) + rank}, torch.tensor(2.0))")
    assert values[1][:3] == (1, "text", [1.5, None])
    assert values[1][3]["t"].tolist() == [1, 2, 3]
    assert isinstance(values[1][3]["t"], numpy.ndarray)
    assert values[1][4] == numpy.float32(2)
    assert lab.values("x = 3") == {0: None, 1: None}
    stayed = lab.values("torch.zeros(1_000_000)")[0]
    assert isinstance(stayed, RemoteValue)
    assert stayed.kind == "Tensor"
    assert "tensor([0., 0." in stayed.text
    assert lab.values("torch.nn.Linear(1, 1)")[1].kind == "Linear"


def test_functions(lab: Lab) -> None:
    """A client's function runs in the rank's namespace, returns its value, and shows its own line when it fails."""

    def scaled(factor: int, *, plus: int = 0) -> Any:
        return factor * rank + plus  # type: ignore[name-defined]  # noqa: F821

    def failing() -> None:
        raise LookupError("from the function")

    scaled.__module__ = failing.__module__ = "__main__"
    assert lab.run(scaled, 10, plus=1).values == {0: 1, 1: 11}
    error = failure(lab, failing)
    assert 'raise LookupError("from the function")' in plain(error.report)
    assert "engine/cells/cell.py" not in error.report


BAD = """
class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise ValueError('bad gradient')
def train(loss):
    loss.backward()
"""


def test_frames_of_libraries_are_folded(lab: Lab) -> None:
    """Of a backward's error the user's frames are shown, and the last one; all of them are where the report says."""
    with pytest.raises(CellError) as caught:
        lab.run(BAD + "train(Bad.apply(torch.ones(1, requires_grad=True)))")
    report = plain(caught.value.report)
    frames = ["line 9\n", "line 8, in train(loss)", "… 4 library frames", "line 6, in Bad.backward(ctx, g)"]
    assert [frame for frame in frames if frame in report] == frames
    assert "site-packages" not in report
    told = re.search(r"sys\.last_value\.failures\[(\d)\]\.traceback", report)
    assert told is not None, report
    whole = plain(caught.value.failures[int(told[1])].traceback)
    assert whole.count("site-packages/torch") == 4
    chained = (
        "try: torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(3))\nexcept RuntimeError: raise KeyError('mine')"
    )
    with pytest.raises(CellError) as caught:
        lab.run(chained)
    assert re.findall(r"… \d+|linear\.py|During handling|'mine'$", plain(caught.value.report), re.MULTILINE)[1:] == [
        "linear.py", "During handling", "'mine'",
    ]  # fmt: skip
    with pytest.raises(CellError) as caught:
        lab.run("%xmode Verbose\ntorch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(3))")
    lab.run("%xmode Context")
    assert "site-packages" in plain(caught.value.report)


def test_same_error_on_all_ranks_is_shown_once(lab: Lab) -> None:
    """A slip that all ranks make has one traceback with the label of all."""
    error = failure(lab, "undefined_name")
    assert str(error) == "ranks 0–1 failed: NameError: name 'undefined_name' is not defined"
    assert plain(error.report).count("NameError: name 'undefined_name'") == 1
    assert set(error.failures) == {0, 1}


def test_later_errors_are_folded(lab: Lab, tmp_path: Path) -> None:
    """Errors are in the order of time; a later one takes one line."""
    mark = tmp_path / "mark"
    code = (
        f"import pathlib, time\nmark = pathlib.Path({str(mark)!r})\nif rank == 1:\n    try:\n"
        "        raise KeyError('first')\n    finally:\n        mark.touch()\n"
        "while not mark.exists(): time.sleep(0.001)\ntime.sleep(0.02)\nraise TypeError('second')"
    )
    error = failure(lab, code)
    assert [(each.rank, each.name, each.secondary) for each in error.failures.values()] == [
        (1, "KeyError", False),
        (0, "TypeError", False),
    ]
    assert plain(error.report).splitlines()[-1].startswith("rank 0 failed ")


def test_a_rank_that_waited_in_a_backward(lab: Lab) -> None:
    """A rank that was freed in a backward says for which bucket it had waited."""
    lab.run("model = ddp_lab.DistributedDataParallel(torch.nn.Linear(2, 2))\nx = torch.ones(1, 2)")
    error = failure(lab, "y = model(x).sum()\nif rank == 1: raise ValueError('bad batch')\ny.backward()")
    assert [each.rank for each in error.failures.values()] == [1, 0]
    assert "rank 0 waited for rank 1 in the backward, for bucket 0 of Linear and was unblocked" in plain(error.report)
    lab.run("model(x).sum().backward()")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("def f(:\n    pass", "SyntaxError"),
        ("if True:\nx = 1", "IndentationError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("raise BaseException('plain')", "BaseException"),
        ("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", "Odd"),
        ("await asyncio.sleep(0, 1, 2, 3)", "TypeError"),
        ("class Bad:\n    def __repr__(self): raise KeyError('in repr')\nBad()", "RuntimeError"),
        ("%no_such_magic", "UsageError"),
    ],
)
def test_all_kinds_of_errors_fail_the_cell(lab: Lab, code: str, name: str) -> None:
    """Whatever a cell raises, and however early, the cell fails with its name, and the next cell runs."""
    lab.run("import asyncio")
    error = failure(lab, code)
    assert {each.name for each in error.failures.values()} == {name}, error.report
    assert lab.values("1") == {0: 1, 1: 1}


@pytest.mark.parametrize("wait", [True, False])
def test_a_caller_that_looks_in(lab: Lab, tmp_path: Path, wait: bool) -> None:
    """While it waits for a cell, `tick` is called: here the cell ends by it."""
    gate = tmp_path / "gate"
    code = f"{held(gate)}\nrank"
    if wait:
        found = lab.run(code, tick=gate.touch, timeout=60)
    else:
        found = lab.run(code, wait=False, timeout=60).wait(tick=gate.touch)
    assert dict(found.values) == {0: 0, 1: 1}


def test_an_interrupt_of_who_waits_for_a_followed_cell(lab: Lab) -> None:
    """Ctrl-C while a cell in the background is waited for interrupts its ranks, which are idle then."""
    run = lab.run("import time\nprint('begun')\ntime.sleep(600)", wait=False)
    wait_until(lambda: all("begun" in run.text(rank) for rank in (0, 1)), "the outputs")
    with pytest.raises(KeyboardInterrupt):
        run.wait(tick=lambda: signal.raise_signal(signal.SIGINT))
    assert run.done
    assert not lab.busy_ranks()


class Broken(SilentBoard):
    """A board that can show nothing."""

    def feed(self, rank: int, kind: str, content: Any) -> None:
        raise OSError("the page is gone")


def test_a_followed_cell_that_can_not_be_shown(lab: Lab) -> None:
    """What keeps the thread from following a cell is its end here: its headline says so, and `wait` raises it."""
    run = lab.run("print('said'); rank", board=Broken(), wait=False)
    with pytest.raises(OSError, match="the page is gone"):
        run.wait()
    assert (run.state, run.headline) == ("failed", "✗ can no longer be followed: OSError: the page is gone")
    wait_until(lambda: not lab.busy_ranks(), "the cell's end")
    assert lab.sum_of_ones() == {0: 2.0, 1: 2.0}


def test_one_rank_goes_on_after_another_failed(lab: Lab, tmp_path: Path) -> None:
    """While a rank goes on, the page says which one has failed and why."""
    go_on = tmp_path / "go on"
    page = Page()
    run = lab.run(f"if rank == 1: raise ValueError('early')\n{held(go_on)}", board=OutputBoard(page), wait=False)
    wait_until(lambda: "rank 1 │ ✗ ValueError: early (rank 0 continues" in page.text, "the failure")
    go_on.touch()
    with pytest.raises(CellError, match="rank 1 failed: ValueError: early"):
        run.wait()


def test_ranks_of_the_readme_train_on_different_batches(lab: Lab) -> None:
    """README's first training ends on both ranks, which then are at different places of different random numbers."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [training] = re.findall(r"```python\n%%distributed --dashboard\n(.*?)```", readme, re.DOTALL)
    lab.run("torch.manual_seed(0)")  # as in ranks that have just been forked
    assert page_of(lab, training) == "rank 0 │ rank 0 of 2 is done\nrank 1 │ rank 1 of 2 is done"
    numbers = lab.pull("torch.rand(1).item()")
    assert numbers[0] != numbers[1]


_BARS = """
from {module} import tqdm
for epoch in tqdm(range(2), desc="epochs", mininterval=0):
    for batch in tqdm(range(50), desc="batches", leave=False, mininterval=0):
        pass
    tqdm.write(f"epoch {{epoch}} is over")
with tqdm(total=40, desc="own", mininterval=0) as bar:
    bar.update(10 + 5 * rank)
    bar.set_postfix(loss=rank / 4)
"""


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_bars_of_ranks_are_merged(lab: Lab, module: str) -> None:
    """Each bar of tqdm is one line for all ranks, whatever tqdm's module; counts that differ are told as a range."""
    page = Page()
    lab.run(_BARS.format(module=module), board=OutputBoard(page))
    lines = page.text.split("\n")
    (epochs,) = [line for line in lines if "epochs: 100%" in line]
    (own,) = [line for line in lines if "own:" in line]
    assert epochs.startswith("ranks 0–1 ┃ ") or epochs.startswith("          ┃ ")
    assert "own:  25%|██▒       | 10..15/40 [" in own
    assert ", loss=0..0.25]" in own
    assert [line.split("│ ")[1] for line in lines if "is over" in line] == ["epoch 0 is over", "epoch 1 is over"]
    assert not [line for line in lines if "batches" in line]


def test_a_flood_is_shown_in_part_and_kept_whole(lab: Lab) -> None:
    """Of 30,000 lines of two ranks five hundred are shown; logs and result have them all, and only their owner has."""
    page = Page()
    code = "for i in range(15_000): print(f'line {i} of rank {rank}' if rank else f'line {i}')\n'the end'"
    result = lab.run(code, board=OutputBoard(page))
    lines = page.text.split("\n")
    assert len(lines) <= 502
    (note,) = [line for line in lines if "not shown" in line]
    assert str(result.logs[1]).replace("rank-1", "rank-*") in note
    for rank in (0, 1):
        expected = "".join(f"line {i}" + (" of rank 1\n" if rank else "\n") for i in range(15_000)) + "'the end'\n"
        assert result.text(rank) == expected
        assert result.logs[rank].read_text() == expected
        assert stat.S_IMODE(result.logs[rank].stat().st_mode) == 0o600
    assert stat.S_IMODE(result.logs[0].parent.stat().st_mode) == 0o700


def test_a_log_that_cannot_be_written_costs_nothing(lab: Lab, tmp_path: Path) -> None:
    """Where the folder for logs can't be made, outputs stay in memory, and the page says why there is no log."""
    (tmp_path / "file").touch()
    logs, lab.session.processes.logs = lab.session.processes.logs, tmp_path / "file" / "outputs"
    try:
        page = Page()
        result = lab.run("for i in range(3_000): print(i)", board=OutputBoard(page))
    finally:
        lab.session.processes.logs = logs
    assert result.logs == {}
    assert "the cell's result has them all (no log: " in page.text
    assert result.text(1) == "".join(f"{i}\n" for i in range(3_000))
