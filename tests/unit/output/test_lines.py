"""Stream text as terminal lines."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.output.terminal import TerminalText, plain


def shown(*chunks: str) -> list[str]:
    """What a terminal shows after these chunks."""
    terminal, lines = TerminalText(), {}
    for chunk in chunks:
        for line in terminal.feed(chunk):
            lines.setdefault(id(line), line)
    return [line.text.rstrip() for line in lines.values()]


def test_lines_end_at_newlines() -> None:
    """Complete lines are closed, the last piece of text stays open."""
    changed = TerminalText().feed("a\nb\r\nc")
    assert [(line.text, line.closed) for line in changed] == [("a", True), ("b", True), ("c", False)]
    assert not any(line.rewritten for line in changed)


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        (["\r  0%|   |", "\r 50%|#  |", "\r100%|###|\n", "done\n"], ["100%|###|", "done"]),  # a progress bar
        (["abcdef\rxy"], ["xycdef"]),  # only what is written over changes
        (["outer 0\n", "inner 0", "\x1b[A\router 1\n", "\rinner 1"], ["outer 1", "inner 1"]),  # nested bars
        (["working...\r\x1b[2Kdone\n"], ["done"]),
    ],
)
def test_lines_are_rewritten_as_in_a_terminal(chunks: list[str], lines: list[str]) -> None:
    """A carriage return goes back to the line's begin, cursor-up to the line above, and erase-in-line empties one."""
    assert shown(*chunks) == lines


def test_what_is_cut_in_two_is_kept_together() -> None:
    """A carriage return at the end of a chunk waits for what follows; a colour sequence that is split between chunks
    arrives whole."""
    terminal = TerminalText()
    terminal.feed("one\r")
    (line,) = terminal.feed("\n")
    assert (line.text, line.closed, line.rewritten) == ("one", True, False)
    (text,) = shown("\x1b[3", "1mred\x1b[0", "m\n")
    assert text == "\x1b[31mred\x1b[0m"
    assert plain(text) == "red"


@given(st.lists(st.text(alphabet="ab \n", max_size=20), max_size=20))
def test_any_cut_of_plain_text_gives_its_lines(chunks: list[str]) -> None:
    """However text is cut into chunks, the lines are those of the whole."""
    expected = [line.rstrip("\n").rstrip() for line in io.StringIO("".join(chunks))]
    assert shown(*chunks) == expected


@given(st.text(alphabet="ab\r\n\x08", max_size=60), st.data())
def test_cuts_do_not_matter_for_control_characters(text: str, data: st.DataObject) -> None:
    """Two cuts of the same text, carriage returns and backspaces included, show the same."""
    cut = data.draw(st.integers(0, len(text)))
    assert shown(text, "\n") == shown(text[:cut], text[cut:], "\n")


@pytest.mark.parametrize("bars", [1, 200])
def test_memory_is_bounded(bars: int) -> None:
    """A terminal keeps a bounded number of lines, however many it has seen."""
    terminal = TerminalText()
    for number in range(bars * 10):
        terminal.feed(f"line {number}\n")
    assert len(terminal._lines) <= 130
