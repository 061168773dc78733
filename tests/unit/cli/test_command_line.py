"""The command line: what it says of wrong arguments, and its help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.cli import main

# Each with a word that tells what is wrong.
WRONG = [
    (["frob"], "'frob'"),
    (["dosc"], "; did you mean docs?"),
    (["--frob"], "COMMAND"),
    (["demo", "extra"], "'extra'"),
    (["demo", "--output", "file/below"], "file is not a folder"),
    (["lab", "nowhere"], "'nowhere'"),
    (["report"], "FILE"),
    (["report", "--frob"], "FILE"),
    (["report", "nowhere"], "no such run: nowhere (expected"),
    (["report", "empty"], "contains no recording"),
    (["report", "file"], "file is not a saved timeline"),
    (["report", "file", "--output", "empty"], "empty is a folder"),
    (["report", "file", "--partail"], "did you mean --partial?"),
    (["compare", "file"], "RUN"),
    (["compare", "nowhere", "file"], "no such run: nowhere (expected"),
    (["compare", "file", "file"], "file is not a saved timeline"),
    (["compare", "file", "file", "file"], "'file'"),
    (["compare", "file", "file", "--threshold", "abc"], "'abc' is not a percentage"),
    (["compare", "file", "file", "--threshold", "-5"], "'-5' is not a percentage"),
    (["compare", "file", "file", "--threshold", "nan"], "'nan' is not a percentage"),
    (["compare", "file", "file", "--json", "empty"], "empty is a folder"),
    (["check-install", "now"], "'now'"),
    (["check-install", "--json", "file/below"], "file is not a folder"),
    (["bench"], "NAME"),
    (["bench", "stp"], "; did you mean step?"),
    (["bench", "start", "--ranks", "0"], "'0' is not a whole number of at least 1"),
    (["bench", "start", "--rounds", "x"], "'x' is not a whole number of at least 1"),
    (["bench", "start", "--ronuds", "9"], "did you mean --rounds?"),
    (["bench", "start", "--json", "empty"], "empty is a folder"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_a_wrong_argument_is_told_in_two_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    """It is named, in at most two lines without a name of ours for it; the exit code is not 0, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    try:
        code = main.main(arguments)
    except SystemExit as end:
        code = int(str(end.code))
    said = capsys.readouterr()
    assert code in (1, 2)
    assert words in said.err
    assert said.err.count("\n") <= 2
    assert said.err.startswith("ddp-lab")
    assert "_" not in said.err
    assert said.out == ""
    assert sorted(os.listdir(tmp_path)) == ["empty", "file"]


@pytest.mark.parametrize(("argument", "code"), [("lessons", 1), ("--help", 0)])  # argparse goes on without a word
def test_a_reader_that_stops_is_no_error(argument: str, code: int) -> None:
    """What `ddp-lab ... | head` no longer reads ends the command without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "ddp_lab", argument], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, "")


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`ddp-lab` alone prints the help with all commands and two examples; its exit code tells that nothing was done."""
    assert main.main([]) == 2
    said = capsys.readouterr().out
    assert "check-install" in said
    assert len(said.partition("examples:\n")[2].splitlines()) == 2


@pytest.mark.parametrize("command", ["demo", "lab", "report", "compare", "check-install", "bench"])
def test_a_commands_help_ends_with_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Two examples stand at the end, and each begins with the command."""
    with pytest.raises(SystemExit) as end:
        main.main([command, "--help"])
    assert end.value.code == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert len(examples) == 2
    assert all(one.startswith(f"  ddp-lab {command}") for one in examples)


def test_jupyterlab_gets_what_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder or notebook is found before and after its options, and is never said twice; nothing is copied then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a b.ipynb").write_text("{}")
    root, first = f"--ServerApp.root_dir={tmp_path / 'mine'}", "--LabApp.default_url=/lab/tree/"
    for given, expected in (
        (["mine", "--port=8889"], [root, "--port=8889"]),
        (["--port", "8889", "mine"], [root, "--port", "8889"]),
        (["mine/a b.ipynb"], [root, f"{first}a%20b.ipynb"]),
        (["mine/a b.ipynb", f"{first}other"], [root, f"{first}other"]),
        (["--ServerApp.root_dir=mine"], ["--ServerApp.root_dir=mine"]),
        (["--notebook-dir", "mine"], ["--notebook-dir", "mine"]),
    ):
        command = main._jupyterlab(given)
        assert command[:3] == [sys.executable, "-m", "jupyterlab"]
        assert command[3:] == expected
    assert os.listdir(tmp_path) == ["mine"]
