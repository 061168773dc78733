"""Progress bars of tqdm: parsed, and those of several ranks merged into one line."""

from __future__ import annotations

from typing import Any

import pytest
from tqdm import tqdm

from ddp_lab.output.progress_bars import Bar, bar_of, began_as, merged, parse
from ddp_lab.output.terminal import TerminalText


def drawn(n: float, total: float | None, seconds: float = 2.0, **options: Any) -> str:
    """What tqdm itself prints for a bar."""
    return tqdm.format_meter(n, total, seconds, **options)


def bar(text: str) -> Bar:
    """The bar that a text is."""
    found = parse(text)
    assert found is not None, text
    return found


@pytest.mark.parametrize(
    ("n", "total", "options", "desc", "printed"),
    [
        (0, 100, {}, "", "0/100"),
        (40, 100, {"prefix": "epoch 1"}, "epoch 1:", "40/100"),
        (3, 10, {"prefix": "a|b 50%", "ncols": 70, "ascii": True}, "a|b 50%:", "3/10"),
        (1_200_000, 5e6, {"unit": "B", "unit_scale": True, "postfix": "loss=0.3"}, "", "1.20M/5.00M"),
        (7, 9, {"seconds": 90_000.0, "postfix": "acc=1e-05, name=[a]"}, "", "7/9"),
        (40, None, {"prefix": "lines", "unit": " lines"}, "lines: ", "40/"),
    ],
)
def test_what_tqdm_prints_is_parsed(n: float, total: float, options: Any, desc: str, printed: str) -> None:
    """Description, count and total are found in every form of tqdm's bar; the count is a number."""
    found = bar(drawn(n, total, **options))
    assert (found.desc, f"{found.n_text}/{found.total}", found.n) == (desc, printed, n)


@pytest.mark.parametrize(
    "text", ["", "50%|###", "loss [1, 2]", "[00:01<00:02, 3it/s]", "x" * 5_000 + "1%| | 1/2 [0<0, 1]"]
)
def test_other_text_is_no_bar(text: str) -> None:
    """What is not of tqdm's form is left alone."""
    assert parse(text) is None


def test_bars_of_several_ranks() -> None:
    """Equal ones are one; else the bar is full up to the last rank, shaded up to the first, and numbers that differ are
    told as a range."""
    text = drawn(40, 100, prefix="train", colour="green")
    assert merged({0: bar(text), 3: bar(text)}) == text
    states = {rank: bar(drawn(n, 100, 2.0 + rank, prefix="epoch 1")) for rank, n in enumerate((60, 81, 20))}
    assert merged(states) == "epoch 1:  20%|██▒▒▒▒▒▒  | 20..81/100 [00:04<00:16,  5.00it/s]"
    states = {rank: bar(drawn(n, None, 2.0, prefix="read", unit="B")) for rank, n in enumerate((4, 6))}
    assert merged(states) == "read: 4..6B [00:02,  2.00B/s]"
    texts = [drawn(5, 10, prefix=f"loss -{loss}", postfix=f"acc={loss}, lr=1e-05") for loss in (0.5, 0.25)]
    assert merged(dict(enumerate(map(bar, texts)))) == (
        "loss -0.5..-0.25:  50%|█████     | 5/10 [00:02<00:02,  2.50it/s, acc=0.25..0.5, lr=1e-05]"
    )
    texts = [drawn(5, 10, postfix=f"host={host}") for host in "ab"]
    assert merged(dict(enumerate(map(bar, texts)))) == " 50%|█████     | 5/10 [00:02<00:02,  2.50it/s, …]"


def test_a_bar_is_known_by_how_it_began() -> None:
    """A description that changes does not make another bar; a line that was cleared begins a new one."""
    terminal = TerminalText()
    (line,) = terminal.feed("\r" + drawn(0, 9, prefix="train"))
    terminal.feed("\r" + drawn(4, 9, prefix="loss 0.5 ") + "\r" + drawn(5, 9, prefix="loss 0.25"))
    now = bar_of(line)
    assert (now.desc, began_as(line, now)) == ("loss 0.25:", ("train:", "9"))
    terminal.feed("\r" + " " * 80 + "\r" + drawn(0, 7, prefix="next"))
    after = bar_of(line)
    assert began_as(line, after) == ("next:", "7")
