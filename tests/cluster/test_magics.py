"""The magics in a real Jupyter kernel, and a notebook run by papermill, which runs it with nbclient."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from ddp_lab.output.terminal import plain
from tests.cluster.pages import Notebook, notebook_with_cluster
from tests.waiting import DEADLINE_S

REPLACES_PROCESSES = True


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """A kernel with the magics and a running cluster of two ranks, which have time to answer who presses Tab."""
    with notebook_with_cluster() as (kernel, started):
        assert "cluster ready: ranks 0–1 · cpu · shm in " in started.text
        kernel.run("from ddp_lab.notebook import completion as c")
        kernel.run(f"c._COMPLETE_SECONDS = c._INSPECT_SECONDS = {DEADLINE_S}; del c")
        yield kernel


def test_load_ext_is_light(notebook: Notebook) -> None:
    """The extension brings in no torch, and with no widget shown no ipywidgets and no plotly."""
    shown = notebook.run("import sys; [name for name in ('torch', 'ipywidgets', 'plotly') if name in sys.modules]")
    assert shown.text == "[]"


def test_a_lesson_without_its_folders(notebook: Notebook) -> None:
    """A lesson that was copied alone is told in one sentence what it needs; other modules are missed as usual."""
    name, _, traceback = notebook.run("from checks.lesson_01 import check").error
    assert name == "ModuleNotFoundError"
    lessons = Path(__file__).parents[2] / "tutorials"
    assert plain(traceback) == (
        f"ModuleNotFoundError: No module named 'checks'. A lesson needs the folders in {lessons} (checks, images, "
        "recordings) beside its notebook: copy them there, or run `ddp-lab lab` in a terminal and open the "
        "lesson there."
    )
    for other in ("import checks", "import nowhere"):
        assert "Traceback" in notebook.run(other).error[2]


def test_outputs_are_labelled(notebook: Notebook) -> None:
    """Outputs of a cell are one plain-text display, labelled by rank; what a long cell showed meanwhile is empty."""
    shown = notebook.run("%%distributed\nprint('same')\nprint('own', rank)\nrank + 1")
    assert shown.status == "ok"
    [block] = filter(None, (data["text/plain"] for data in shown.page.blocks.values()))
    labelled: dict[str, list[str]] = {}
    label = ""
    for line in plain(block).splitlines():  # ranks in the order in which their lines came
        label = line[:9].strip() or label
        labelled.setdefault(label, []).append(line[10:])
    assert labelled == {"ranks 0–1": ["│ same"], "rank 0": ["│ own 0", "→ 1"], "rank 1": ["│ own 1", "→ 2"]}
    assert not shown.results


def test_some_ranks(notebook: Notebook) -> None:
    """`--ranks` runs the cell there alone; `--quiet` shows nothing."""
    assert notebook.run("%%distributed --ranks 1\nprint(rank)").text == "rank 1 │ 1"
    quiet = notebook.run("%%distributed --quiet\nprint(rank)")
    assert (quiet.status, quiet.text) == ("ok", "")
    assert notebook.run("__import__('ddp_lab').current_cluster().last_result.text(1)").text == "'1\\n'"


def test_failed_cell(notebook: Notebook) -> None:
    """The error is a CellError with a telling value; the traceback shows the cell's own line and folds the peers."""
    shown = notebook.run(
        "%%distributed\nt = torch.ones(1)\nif rank == 1:\n    raise ValueError('bad batch')\ndist.all_reduce(t)"
    )
    assert shown.status == "error"
    name, value, traceback = shown.error
    assert (name, value) == ("CellError", "rank 1 failed: ValueError: bad batch")
    assert "----> 4     raise ValueError('bad batch')" in traceback  # the magic's line is the first
    assert "rank 0 waited for rank 1 in all_reduce #" in traceback
    assert "of 4 B (float32 [1]) and was unblocked" in traceback
    assert "cells/run.py" not in traceback
    assert notebook.run("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()").text == "ranks 0–1 → 2.0"


def test_interrupt(notebook: Notebook) -> None:
    """The Interrupt button ends Python code and collectives on all ranks; their place is told, variables are kept."""
    waiting = "dist.all_reduce(torch.ones(1)) if rank == 0 else time.sleep(600)"
    shown = notebook.run(f"%%distributed\nimport time\nkept = rank\nprint('begun')\n{waiting}", interrupt_when="begun")
    assert shown.status == "error"
    assert shown.error[0] == "KeyboardInterrupt"
    assert "Cell %%distributed [" in shown.error[2]
    after = notebook.run("%%distributed\nt = torch.ones(1); dist.all_reduce(t); (t.item(), kept)")
    assert after.text.splitlines() == ["rank 0 → (2.0, 0)", "rank 1 → (2.0, 1)"]


@pytest.mark.parametrize("presses", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_rank_that_ignores_the_interrupt(notebook: Notebook, presses: int) -> None:
    """A rank that swallows interrupts does not keep the notebook: it is named; a second interrupt returns at once."""
    stubborn = "while rank == 1:\n    try: time.sleep(600)\n    except KeyboardInterrupt: pass"
    shown = notebook.run(f"%%distributed\nimport time\nprint('begun')\n{stubborn}", "begun", presses)
    assert shown.error[0] == "KeyboardInterrupt"
    assert "rank 1 did not respond to the interrupt: `%cluster interrupt` tries again" in shown.error[2]
    refused = notebook.run("%%distributed\n1").error[1]
    assert "rank 1 is still running a cell" in refused
    assert "`%cluster rejoin --replace 1`" in refused
    replaced = notebook.run("%cluster rejoin --replace 1")
    assert replaced.status == "ok", replaced.error
    assert notebook.run("%%distributed\nrank").text == "rank 0 → 0\nrank 1 → 1"


def test_timeout_option(notebook: Notebook) -> None:
    """`--timeout` ends the cell with an error that names the ranks that had not ended."""
    shown = notebook.run("%%distributed --timeout 0.3 --name slow\nif rank == 1:\n    import time; time.sleep(600)")
    assert shown.error[:2] == ("CellError", "rank 1 did not end within 0.3 s")
    assert "Cell slow [" in shown.error[2]


def test_a_dashboard_of_a_cell_stays_live_until_the_next(notebook: Notebook) -> None:
    """`--dashboard` shows one above the cell's own output. After its cell it still updates and its controls work; that
    of the next such cell takes its place."""
    shown = notebook.run("%%distributed --dashboard\nprint('trained')")
    assert shown.status == "ok", shown.error
    above, *_, below = shown.page.blocks.values()
    assert "application/vnd.jupyter.widget-view+json" in above
    assert plain(str(below["text/plain"])) == "ranks 0–1 │ trained"
    notebook.run("from ddp_lab.notebook import commands; (first,) = commands._watched")
    live = "first.refresh(); (first._refresher.running, first.control['live'], first.control['why'])"
    assert notebook.run(live).text == "(True, True, '')"
    assert notebook.run("%%distributed --dashboard\n2").status == "ok"
    gone = "(first._refresher.running, first.control['live'], len(commands._watched))"
    assert notebook.run(gone).text == "(False, False, 1)"


def ended(notebook: Notebook, name: str) -> str:
    """What `%cluster results` says of a named cell once it has ended."""
    notebook.run(
        f"run = __import__('ddp_lab').current_cluster().results[{name!r}]\ntry: run.wait()\nexcept Exception: pass"
    )
    rows = [row.split() for row in notebook.run("%cluster results").text.splitlines()]
    return next(row[1] for row in rows if row[:1] == [name])


def test_no_wait(notebook: Notebook) -> None:
    """`--no-wait` gives the prompt back; outputs keep coming below the cell, and above them how far it is.

    `lab.results` has one object for it, while it runs and when it has ended.
    """
    code = "import threading; go_on = threading.Event(); print('begun'); go_on.wait(0.2); print('ended'); rank"
    begun = notebook.run(f"%%distributed --no-wait --name later\n{code}")
    assert begun.status == "ok"
    assert not begun.results
    assert re.search(r"later \[\d+\]: running for 0\.\d s \(at \d\d:\d\d:\d\d\)", begun.text)
    waited = notebook.run("run = __import__('ddp_lab').current_cluster().results['later']; run.wait().values, run.done")
    assert "({0: 0, 1: 1}, True)" in waited.text
    assert "ranks 0–1 │ begun\n          │ ended" in waited.text
    assert re.search(r"later \[\d+\]: ✓ done in \d\.\d s", waited.text)
    after = notebook.run(
        "run.status().state, run.values, dict(run.failures), ''.join(o.get('text', '') for o in run.outputs()[1]), "
        "run.wait().values"
    )
    assert after.text.splitlines()[-1] == "('done', {0: 0, 1: 1}, {}, 'begun\\nended\\n', {0: 0, 1: 1})"


@pytest.mark.parametrize(
    ("code", "ends", "headline"),
    [
        ("1 / 0", "failed", r"✗ ranks 0–1 failed after \d\.\d s: ZeroDivisionError: division by zero"),
        (
            "if rank == 1: raise ValueError('end of data')\ndist.barrier()",
            "failed",
            r"✗ rank 1 failed after \d\.\d s: ValueError: end of data",
        ),
        ("__import__('time').sleep(600)", "interrupted", r"■ interrupted after \d\.\d s"),
    ],
)
def test_a_cell_in_the_background_ends_on_the_page(notebook: Notebook, code: str, ends: str, headline: str) -> None:
    """Below the cell that started it: how it ended, and, if it failed, the block of a cell that is waited for."""
    message = notebook.begin(f"%%distributed --no-wait --name told\n{code}")
    shown = notebook.finish(message)
    if ends == "interrupted":
        notebook.run("__import__('ddp_lab').current_cluster().interrupt()")
    shown = notebook.watch(
        message, shown, lambda: re.search(headline, shown.text) and (ends != "failed" or shown.error[1])
    )
    if ends == "failed":
        assert "----> " in shown.error[2]
    assert ended(notebook, "told") == ends
    assert notebook.run("run.status().state").text == repr(ends)
    assert notebook.run("%%distributed\nrank").text == "rank 0 → 0\nrank 1 → 1"


def test_a_queued_cell_in_the_notebook(notebook: Notebook) -> None:
    """A cell behind one with `--no-wait` says for which it waits; interrupting it leaves the other alone."""
    begun = "print('begun'); import time; time.sleep(600)"
    assert "first [" in notebook.run(f"%%distributed --no-wait --name first\n{begun}").text
    second = notebook.run("%%distributed --name second\n2", interrupt_when="waits for first [")
    assert re.search(r"cell second \[\d+\] was interrupted before it began; first \[\d+\] continues", second.error[2])
    rows = [row.split() for row in notebook.run("%cluster results").text.splitlines()]
    assert ["first", "running", "ranks", "0–1"] in [row[:4] for row in rows]
    assert notebook.run("%cluster interrupt").status == "ok"
    assert notebook.run("%%distributed --name third\nrank").text == "rank 0 → 0\nrank 1 → 1"
    rows = [row.split() for row in notebook.run("%cluster results").text.splitlines()]
    assert ["first", "interrupted", "ranks", "0–1"] in [row[:4] for row in rows]
    assert any(row[:2] == ["third", "done"] and row[-4:] == ["0:", "0;", "1:", "1"] for row in rows)
    third = notebook.run("__import__('ddp_lab').current_cluster().results['third'].values").text
    assert third == "{0: 0, 1: 1}"


@pytest.mark.parametrize(
    ("cell", "line", "name"),
    [
        ("x = 1\nif True:\ny = 2", 4, "IndentationError"),
        ("\n\nx = (1", 4, "SyntaxError"),
        ("sent = 1\nreturn 3", 3, "SyntaxError"),
        ("%%time\nsent = 1\ndef f(:", 4, "SyntaxError"),
    ],
)
def test_syntax_errors(notebook: Notebook, cell: str, line: int, name: str) -> None:
    """A cell that does not compile is refused here, at the notebook's own line; nothing is sent."""
    notebook.run("%%distributed\nsent = 0")
    shown = notebook.run(f"%%distributed\n{cell}")
    assert (shown.status, shown.error[0]) == ("error", name)
    assert shown.error[1].endswith(f"line {line})")
    assert "notebook/brief_errors.py" not in shown.error[2]
    assert notebook.run("%%distributed\nsent").text == "ranks 0–1 → 0"


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "ranks 0–1 → 'slept'"),
        ("%%time\n%time 1\nmade = !echo made\nprint(made)", "│ ['made']"),
        ("cd /", "ranks 0–1 │ /"),
        ("def known():\n    'what it does'\nknown?", "what it does"),
        ("def known():\n    return 'its source'\nknown??", "│     return 'its source'"),
    ],
)
def test_what_only_ipython_understands(notebook: Notebook, cell: str, text: str) -> None:
    """Top-level `await`, magics, shell commands and `name?` are no syntax errors; what all ranks show is shown once."""
    shown = notebook.run(f"%%distributed\n{cell}").text
    assert shown.count(text) == 1
    assert "/<cell " not in shown  # as a file


def test_completion(notebook: Notebook) -> None:
    """Names and attributes of the ranks are completed in `%%distributed` cells, without calling anything."""
    notebook.run(
        "%%distributed\nlayers = torch.nn.Sequential(torch.nn.Linear(2, 2))\nasked = []\n"
        "class Probe:\n    @property\n    def computed(self): asked.append(1); return 1\n"
        "probe = Probe(); probe.own = [1]\nif rank == 1: only_there = {'key': 'text'}"
    )
    assert notebook.complete("%%distributed\nlayers[0].wei") == ["weight"]
    assert notebook.complete("%%distributed --ranks 0-1\nx = 1\nprint(probe.o") == ["own"]
    assert notebook.complete("%%distributed\nprobe.own.app") == ["append"]
    assert notebook.complete("%%distributed\nprobe.computed.") == []
    assert "only_there" not in notebook.complete("%%distributed\nonly_")
    assert notebook.complete("%%distributed --ranks 1\nonly_") == ["only_there"]
    assert notebook.complete("%%distributed --ranks=1\nonly_there['key'].isal") == ["isalnum", "isalpha"]
    assert {"range", "rank"} <= set(notebook.complete("%%distributed\nfor i in ran"))
    assert "layers" not in notebook.complete("lay")
    notebook.run("%%distributed --no-wait\nimport time; time.sleep(600)")
    assert notebook.complete("%%distributed\nlay") == ["layers"]
    notebook.run("%cluster interrupt")
    assert notebook.run("%%distributed\nasked").text == "ranks 0–1 → []"


def test_inspection(notebook: Notebook) -> None:
    """Shift-Tab in a `%%distributed` cell shows what a name is on the rank, elsewhere what it is in the notebook."""
    notebook.run(
        "%%distributed\nstack = torch.nn.Sequential(torch.nn.Linear(2, 3))\nasked = []\nname = 'there'\n"
        "class Shy:\n    'Tells nothing.'\n    def __repr__(self): asked.append(1); return ''\n    __len__ = __repr__\n"
        "shy = Shy()\ndef scaled(x, by=2):\n    'Multiplies.'\n    return by * x\nif rank == 1: only_there = [1, 2]"
    )
    notebook.run("name, mine = 1, 2")
    shown = notebook.inspect("%%distributed --ranks 0\ny = scaled(1, |")
    assert shown.startswith("Rank: 0\nSignature: scaled(x, by=2)\nType: function\n")
    assert "Docstring: Multiplies." in shown
    assert "return by * x" in notebook.inspect("%%distributed\nscal|ed", detail=1)
    assert "Tensor: float32 [3, 2] on cpu, requires grad, a parameter" in notebook.inspect(
        "%%distributed\nstack[0].wei|ght"
    )
    assert "Parameters: 9 in 2 tensors\nChildren: 0: Linear\n" in notebook.inspect("%%distributed\nsta|ck(1)")
    assert "Value: 'there'\n" in notebook.inspect("%%distributed\nname|")
    assert "Tells nothing." in notebook.inspect("%%distributed\nshy|")
    assert notebook.inspect("%%distributed\nonly_there|") == notebook.inspect("%%distributed\nmine|") == ""
    assert "Rank: 1\nType: list\nLength: 2" in notebook.inspect("%%distributed --ranks 1\nonly_there|")
    assert "Signature: print(" in notebook.inspect("%%distributed\nprint(|")
    assert "int" in notebook.inspect("name|")
    assert "Runs the cell on the ranks" in notebook.inspect("%%distri|buted\nname")
    notebook.run("%%distributed --no-wait\nimport time; time.sleep(600)")
    assert "Multiplies." in notebook.inspect("%%distributed\nscaled|")
    notebook.run("%cluster interrupt")
    assert notebook.run("%%distributed\nasked").text == "ranks 0–1 → []"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%%distributed --rank 1", "unknown option '--rank'; did you mean --ranks?"),
        ("%%distributed --ranks x", "argument --ranks: 'x' does not name ranks"),
        ("%%distributed --ranks 7", "there is no rank 7: the cluster has ranks 0 to 1"),
        ("%%distributed --timeout soon", "argument --timeout: 'soon' is not a time in seconds"),
        ("%%distributed --name 'open", "No closing quotation"),
        ("%cluster start -n none", "argument -n: 'none' is not a number of ranks"),
        ("%cluster start --env NAME", "argument --env: 'NAME' is not NAME=VALUE"),
        ("%cluster start --backend smoke", "argument --backend: invalid choice: 'smoke'"),
        ("%cluster start --device 0", "unknown option '--device'; did you mean --devices?"),
        ("%cluster fly", "invalid choice: 'fly'"),
        ("%cluster strat", "; did you mean start?"),
        ("%push nowhere", "%push: no variable nowhere in this notebook"),
        ("%pull nowhere", "no nowhere on ranks 0–1"),
        ("%pull", "the following arguments are required: NAME"),
    ],
)
def test_wrong_options(notebook: Notebook, line: str, message: str) -> None:
    """A wrong option is a UsageError that names it and says what is valid."""
    shown = notebook.run(line + ("\npass" if line.startswith("%%") else ""))
    assert shown.status == "error"
    assert message in shown.text
    assert "UsageError" in shown.text


def test_help(notebook: Notebook) -> None:
    """The help of %cluster says of each of its commands what it does."""
    shown = notebook.run("%cluster --help").text
    for command in ("start", "attach", "status", "rejoin", "interrupt", "detach", "list", "results", "doctor"):
        assert re.search(rf"^ +{command}\s+[A-Z]", shown, re.MULTILINE), command


def test_push_and_pull(notebook: Notebook) -> None:
    """Variables go to the ranks and come back bound and returned: by rank, or the value itself of a single rank."""
    notebook.run("numbers = [1, 2]\nadd = lambda x: x + sum(numbers_there)\nnumbers_there = [10]")
    assert notebook.run("%push numbers numbers_there add").status == "ok"
    assert notebook.run("%%distributed\nown = torch.tensor([add(rank)]); own").text.splitlines() == [
        "rank 0 → tensor([10])",
        "rank 1 → tensor([11])",
    ]
    assert notebook.run("%pull own").text == "{0: array([10]), 1: array([11])}"
    assert notebook.run("own[1]").text == "array([11])"
    assert notebook.run("one = %pull own --ranks 1\none").text == "array([11])"


def test_what_shows_nothing_leaves_no_output(notebook: Notebook) -> None:
    """Cells that show nothing leave no display, however long they run: of `lab.tune`, its lines alone are kept."""
    model = "model = ddp_lab.DistributedDataParallel(torch.nn.Linear(8, 8))\nimport time"
    assert notebook.run(f"%%distributed\n{model}").status == "ok"
    slow = "time.sleep(0.5); model(torch.ones(1, 8)).sum().backward()"  # 8 steps are trained in a cell before the turns
    shown = notebook.run(f"lab.tune({slow!r}, steps=1, seconds=1)")
    assert shown.status == "ok", shown.error
    assert "Nothing was changed" in shown.results[0]["text/plain"]
    assert not shown.page.blocks


def test_status(notebook: Notebook) -> None:
    """The table of ranks comes as text and as HTML."""
    shown = notebook.run("%cluster status")
    (data,) = shown.page.blocks.values()
    assert str(data["text/plain"]).splitlines()[0].split()[:3] == ["rank", "state", "device"]
    assert str(data["text/html"]).count("<tr>") == 3


def test_starting_again_keeps_the_cluster(notebook: Notebook) -> None:
    """A notebook can be run again from the top; asking for another size is an error that says what to do."""
    notebook.run("%%distributed\nkept_over_start = 1")
    assert "is already running" in notebook.run("%cluster start -n 2").text
    assert notebook.run("%%distributed\nkept_over_start").text == "ranks 0–1 → 1"
    other = notebook.run("%cluster start -n 3")
    assert other.error[0] == "ClusterError"
    assert "%cluster stop" in other.error[1]


def test_the_cluster_is_called_lab(notebook: Notebook) -> None:
    """Starting names the cluster `lab` and says so; a variable of the user's of that name is kept."""
    assert notebook.run("lab.world_size").text == "2"
    notebook.run("lab = 'mine'")
    assert "`lab`" not in notebook.run("%cluster start -n 2").text
    assert notebook.run("lab").text == "'mine'"
    notebook.run("del lab")
    assert "`lab` is the cluster" in notebook.run("%cluster start -n 2").text
    assert notebook.run("lab.running").text == "True"


def test_rejoin_and_restart(notebook: Notebook) -> None:
    """Rejoin keeps variables, restart does not."""
    notebook.run("%%distributed\nkept = 1")
    assert "rejoined in" in notebook.run("%cluster rejoin").text
    assert notebook.run("%%distributed\nkept").text == "ranks 0–1 → 1"
    assert "variables are lost" in notebook.run("%cluster restart").text
    assert notebook.run("%%distributed\n'kept' in globals()").text == "ranks 0–1 → False"


def test_ranks_ask_for_input(notebook: Notebook) -> None:
    """`input()` on each rank asks in the notebook, by the rank's name; where nobody waits, the error says so."""
    notebook.asked.clear()
    shown = notebook.run("%%distributed\nname = input('name? '); f'{rank} got {name}'", answers=["first", "second"])
    assert shown.status == "ok", shown.error
    assert sorted(notebook.asked) == ["rank 0 │ name? ", "rank 1 │ name? "]
    asked = [int(prompt.split()[1]) for prompt in notebook.asked]
    assert all(f"'{rank} got {name}'" in shown.text for rank, name in zip(asked, ("first", "second"), strict=True))
    notebook.run("%%distributed --no-wait --name asks\ninput()")
    shown = notebook.run("import ddp_lab; ddp_lab.current_cluster().results['asks'].wait()")
    assert "run it without --no-wait" in shown.error[2]


def test_a_breakpoint_on_a_rank(notebook: Notebook) -> None:
    """The debugger shows and changes a rank's variables; an interrupt ends it and the cell, nothing is lost."""
    code = "%%distributed --ranks 1\nloss = 41\nbreakpoint()\nloss + 1"
    shown = notebook.run(code, answers=["p 'it is', loss", "loss = 99", "c"])
    assert shown.status == "ok", shown.error
    assert "('it is', 41)" in shown.text
    assert "→ 100" in shown.text
    notebook.asked.clear()
    shown = notebook.run(code, interrupt_when="(Pdb)")
    assert shown.error[0] == "KeyboardInterrupt"
    assert notebook.run("%%distributed\ndist.barrier(); globals().get('loss')").text == "rank 1 → 41"


def notebook_of(*cells: str) -> Any:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    return made


def text_of(cell: Any) -> str:
    """The plain text of a saved cell."""
    return plain("\n".join(str(output.get("text") or output["data"].get("text/plain", "")) for output in cell.outputs))


@pytest.mark.soak
def test_papermill(tmp_path: Path) -> None:
    """papermill saves what was streamed, and a failed cell stops it with the error of the rank; the file holds it."""
    book = notebook_of(
        "%load_ext ddp_lab",
        "%%distributed\nimport time\nfor step in range(3):\n    print('step', step); time.sleep(0.1)\nrank",
        "%%distributed\nif rank == 0: 1 / 0\ndist.barrier()",
        "never = 'run'",
    )
    nbformat.write(book, tmp_path / "in.ipynb")
    with pytest.raises(papermill.PapermillExecutionError, match=r"(?s)rank 0 failed.* in cell .*division by zero"):
        papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", progress_bar=False)
    saved = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    _, streamed, failed, never = (cell for cell in saved.cells if cell.cell_type == "code")
    assert "no cluster is running: starting one with defaults" in text_of(streamed)
    steps = "\n".join(f"{'ranks 0–1' if step == 0 else '         '} │ step {step}" for step in range(3))
    assert text_of(streamed).rstrip().endswith(f"{steps}\n   rank 0 → 0\n   rank 1 → 1")
    *_, error = failed.outputs
    assert error.ename == "CellError"
    assert never.execution_count is None
