"""What a board shows of several ranks' outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from ddp_lab.output.board import LineBoard, OutputBoard
from ddp_lab.output.terminal import plain
from ddp_lab.output.throttle import thinned


class Page:
    """Holds displays as a notebook page does: in the order in which they were made, each in its last state."""

    def __init__(self) -> None:
        self.blocks: dict[str, Mapping[str, Any]] = {}
        self.updates = 0

    def publish(self, key: str, data: Mapping[str, Any], metadata: Mapping[str, Any], update: bool) -> None:
        assert update == (key in self.blocks)
        self.blocks[key] = data
        self.updates += update

    def lines(self) -> list[str]:
        """All plain text, without colours."""
        return plain("\n".join(str(data["text/plain"]) for data in self.blocks.values())).split("\n")


def stream(text: str, name: str = "stdout") -> dict[str, str]:
    return {"name": name, "text": text}


def bundle(**data: str) -> dict[str, Any]:
    return {"data": {key.replace("_", "/"): value for key, value in data.items()}, "metadata": {}}


def board() -> tuple[OutputBoard, Page]:
    page = Page()
    return OutputBoard(page), page


OWN = [f"   rank {rank} │ own {rank}" for rank in range(3)]
PHASES = {
    "own lines move above the next shared one": [
        ([(rank, f"begin\nown {rank}\nend\n") for rank in range(3)], ["ranks 0–2 │ begin", *OWN, "ranks 0–2 │ end"])
    ],
    "a line that is printed three times has three rows": [
        ([(0, "x\nx\nx\n"), (1, "x\n")], ["ranks 0–1 │ x", "   rank 0 │ x", "          │ x"])
    ],
    "a late rank joins the row of the others": [
        ([(0, "one\ntwo\n")], ["rank 0 │ one", "       │ two"]),
        ([(1, "one\ntwo\n")], ["ranks 0–1 │ one", "          │ two"]),
    ],
    "a line that grows joins when it is complete": [
        ([(0, "loading... "), (1, "loading... done\n")], ["rank 0 │ loading...", "rank 1 │ loading... done"]),
        ([(0, "done\n")], ["ranks 0–1 │ loading... done"]),
    ],
}


@pytest.mark.parametrize("name", PHASES)
def test_equal_lines_of_several_ranks_are_shown_once(name: str) -> None:
    """Lines that all ranks print carry the label of all, others that of their rank."""
    shown, page = board()
    for number, (texts, lines) in enumerate(PHASES[name], start=1):
        for rank, text in texts:
            shown.feed(rank, "stream", stream(text))
        shown.refresh(final=number == len(PHASES[name]))
        assert page.lines() == lines
    assert name != "a late rank joins the row of the others" or page.updates == 1


def bar(n: int, total: int = 100, desc: str = "train") -> str:
    """What tqdm prints for a bar after two seconds."""
    return "\r" + tqdm.format_meter(n, total, 2.0, prefix=desc)


def test_rows_of_bars() -> None:
    """Bars that began alike share a row with their range; one that only some ranks have carries their label. Rewritten
    lines that are not tqdm's are updated in place and never shared."""
    shown, page = board()
    for rank, n in enumerate((40, 50, 60)):
        shown.feed(rank, "stream", stream(bar(0) + bar(n), "stderr"))
    shown.feed(2, "stream", stream("\n" + bar(1, 2, "own"), "stderr"))
    shown.refresh(final=True)
    first, second = page.lines()
    assert first.startswith("ranks 0–2 ┃ train:  40%|████▒▒    | 40..60/100 [00:02<00:03,")
    assert second.startswith("   rank 2 ┃ own:  50%|█████     | 1/2 [")
    shown, page = board()
    for percent in (0, 50, 100):
        for rank in (0, 1):
            shown.feed(rank, "stream", stream(f"\r{percent}%|", "stderr"))
        shown.refresh()
    assert page.lines() == ["rank 0 ┃ 100%|", "rank 1 ┃ 100%|"]


def test_bars_are_nested_and_stay_in_sight() -> None:
    """The inner bar moves below the outer one, comes and goes, and neither is mixed up with the other. A bar that still
    moves is shown although the lines around it are left out."""
    shown, page = board()
    for epoch in (1, 2):
        for rank in (1, 0):
            inner = "".join("\n" + bar(n, 10, "batches") + "\x1b[A" for n in (0, 4 + rank))
            shown.feed(rank, "stream", stream(bar(epoch, 2, "epochs") + inner, "stderr"))
        shown.refresh()
        assert [line.split("|")[0] for line in page.lines()] == [
            f"ranks 0–1 ┃ epochs: {50 * epoch:3}%",
            "          ┃ batches:  40%",
        ]
        for rank in (0, 1):
            shown.feed(rank, "stream", stream("\n\r" + " " * 80 + "\r\x1b[A", "stderr"))
    shown.refresh(final=True)
    assert [line.split("|")[0] for line in page.lines()] == ["ranks 0–1 ┃ epochs: 100%"]
    shown, page = board()
    lines = [f"line {n}\n" for n in range(2_000)]
    shown.feed(0, "stream", stream("".join(lines[:500])))
    shown.refresh()
    shown.feed(0, "stream", stream(bar(1), "stderr"))
    for begin in range(500, 2_000, 500):
        shown.feed(0, "stream", stream("".join(lines[begin : begin + 500])))
        shown.refresh()
    shown.feed(0, "stream", stream(bar(77), "stderr"))
    shown.refresh(final=True)
    assert any("train:  77%" in line for line in page.lines())
    assert len(page.lines()) == 502


def test_text_written_between_bars_is_shared() -> None:
    """A line that takes a bar's place (`tqdm.write`) is shared by the ranks as any other, and so is the bar."""
    shown, page = board()
    for n in (10, 20):
        for rank in (0, 1):
            shown.feed(rank, "stream", stream(bar(0) + bar(n) + "\r" + " " * 80 + f"\rat {n}\n" + bar(n + 1), "stderr"))
            shown.refresh()
    shown.refresh(final=True)
    assert sorted(line[12:].split("|")[0] for line in page.lines()) == ["at 10", "at 20", "train:  21%"]
    assert page.lines()[0].startswith("ranks 0–1 ┃ ")
    assert not any("rank " in line for line in page.lines())


def test_values_and_silent_cells() -> None:
    """The last expression's value has an arrow, its further lines are aligned; a cell without output leaves no empty
    display behind."""
    shown, page = board()
    shown.feed(0, "execute_result", bundle(text_plain="tensor([1.,\n        2.])"))
    shown.refresh(final=True)
    assert page.lines() == ["rank 0 → tensor([1.,", "                 2.])"]
    shown, page = board()
    shown.refresh(final=True)
    assert page.blocks == {}


def test_rich_outputs_keep_their_bundle() -> None:
    """A figure is displayed unchanged below its label; an equal one of another rank is not repeated. Neighbouring
    figures of different ranks are in rank order once the cell has ended."""
    shown, page = board()
    for rank in (0, 1):
        shown.feed(rank, "stream", stream("before\n"))
        shown.feed(rank, "display_data", bundle(image_png="AAAA", text_plain="<Figure>"))
        shown.feed(rank, "stream", stream("after\n"))
    shown.refresh(final=True)
    assert list(page.blocks.values())[1] == {"image/png": "AAAA", "text/plain": "<Figure>"}
    assert page.lines() == ["ranks 0–1 │ before", "ranks 0–1 ▾", "<Figure>", "ranks 0–1 │ after"]
    shown, page = board()
    for rank in (2, 0, 1):
        shown.feed(rank, "stream", stream("plot\n"))
        shown.feed(rank, "display_data", bundle(image_png=str(rank), text_plain=f"<Figure {rank}>"))
        shown.refresh()
    shown.refresh(final=True)
    assert [line.strip() for line in page.lines()] == [
        "ranks 0–2 │ plot",
        *(line for rank in range(3) for line in (f"rank {rank} ▾", f"<Figure {rank}>")),
    ]


def test_an_update_replaces_a_display() -> None:
    """`update_display` on a rank changes what that rank displayed, and nothing else; widgets of two ranks are two
    displays, each with its reference to the model on its rank."""
    shown, page = board()
    for rank in (0, 1):
        shown.feed(rank, "display_data", {**bundle(text_plain="0 of 2"), "transient": {"display_id": "a"}})
    shown.feed(1, "update_display_data", {**bundle(text_plain="2 of 2"), "transient": {"display_id": "a"}})
    shown.refresh(final=True)
    assert page.lines() == ["rank 0 │ 0 of 2", "rank 1 │ 2 of 2"]
    shown, page = board()
    for rank in (0, 1):
        content = bundle(text_plain="HBox()")
        content["data"]["application/vnd.jupyter.widget-view+json"] = {"model_id": str(rank)}
        shown.feed(rank, "display_data", content)
    shown.refresh(final=True)
    shown_models = [data.get("application/vnd.jupyter.widget-view+json") for data in page.blocks.values()]
    assert [model for model in shown_models if model] == [{"model_id": "0"}, {"model_id": "1"}]


def test_clear_output_and_a_new_plot_use_the_same_place() -> None:
    """A live plot (clear, display, clear, display) does not grow the page."""
    shown, page = board()
    for step in range(5):
        for rank in (0, 1):
            shown.feed(rank, "clear_output", {"wait": True})
            shown.feed(rank, "stream", stream(f"step {step}\n"))
            shown.feed(rank, "display_data", bundle(image_png=f"{step}", text_plain=f"<Figure {step}>"))
        shown.refresh()
    shown.refresh(final=True)
    assert [line for line in page.lines() if line] == ["ranks 0–1 │ step 4", "ranks 0–1 ▾", "<Figure 4>"]
    assert len(page.blocks) == 4


def test_long_text_shows_head_and_tail() -> None:
    """Of ten thousand lines the first and last are shown, and how many are not; while the cell runs fewer are, and what
    is in the note and on the page are all lines."""
    shown, page = board()
    for rank in (0, 1):
        for begin in range(0, 10_000, 1_000):
            shown.feed(rank, "stream", stream("".join(f"line {n}\n" for n in range(begin, begin + 1_000))))
    shown.refresh(final=True)
    lines = page.lines()
    assert lines[0] == "ranks 0–1 │ line 0"
    assert lines[-1].endswith("│ line 9999")
    assert len(lines) <= 501
    (note,) = [line for line in lines if "not shown" in line]
    assert f"{2 * (10_000 - len(lines) + 1):,} lines not shown" in note
    assert lines[lines.index(note) + 1].startswith("ranks 0–1 │ line")
    shown, page = board()
    shown.feed(0, "stream", stream("".join(f"line {n}\n" for n in range(450))))
    shown.refresh()
    lines = page.lines()
    (note,) = [line for line in lines if "not shown" in line]
    assert len(lines) == 201
    assert "250 lines not shown" in note
    shown.refresh(final=True)
    assert len(page.lines()) == 450


@pytest.mark.parametrize("kind", ["long lines", "long values", "figures", "colours", "many ranks"])
def test_a_page_is_bounded(kind: str) -> None:
    """Whatever ranks put out, the page has a bounded number of displays, lines, characters and colours."""
    page = Page()
    shown = OutputBoard(page)
    for number in range(3_000):
        content = {
            "long lines": stream(f"{number} " + 500 * "x" + "\n"),
            "long values": bundle(text_plain=f"{number}\n" * 40),
            "figures": bundle(image_png=str(number), text_plain=f"<Figure {number}>"),
            "colours": stream(f"\x1b[31m{number}\x1b[0m\n"),
            "many ranks": stream(f"{number}\n"),
        }[kind]
        rank = number % 64 if kind == "many ranks" else 0
        shown.feed(rank, "stream" if "text" in content else "display_data", content)
    pause = shown.refresh(final=True)
    texts = [str(data["text/plain"]) for data in page.blocks.values()]
    assert len(page.blocks) <= 201
    assert sum(text.count("\n") + 1 for text in texts) <= 800
    assert sum(map(len, texts)) <= 200_000
    assert sum(text.count("\x1b[") for text in texts) <= 1_000
    assert 0 < pause <= 2
    assert shown.refresh() == 0


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.sampled_from(["a\n", "b", "\n"]), max_size=12)), max_size=12),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_thinned_text_is_the_beginning_and_the_end(messages: list[tuple[int, list[str]]], head: int, tail: int) -> None:
    """Of each rank's text its first and last lines are left, whole, and as many lines as were taken out are counted."""
    given_text: dict[int, str] = {0: "", 1: ""}
    for rank, texts in messages:
        given_text[rank] += "".join(texts)
    left: dict[int, str] = {0: "", 1: ""}
    counts = {0: 0, 1: 0}
    for rank, _, content, out in thinned(
        [(rank, "stream", stream("".join(texts))) for rank, texts in messages], head, tail
    ):
        left[rank] += content["text"]
        counts[rank] += out
    for rank, text in given_text.items():
        assert text.count("\n") - left[rank].count("\n") == counts[rank]
        lines, kept = text.split("\n"), left[rank].split("\n")
        if len(lines) - 1 <= head + tail:
            assert kept == lines
        else:
            assert kept[:head] == lines[:head]
            assert kept[-tail - 1 :] == lines[-tail - 1 :]
            assert set(kept) <= set(lines)


def test_what_is_announced_stands_below_what_came() -> None:
    """An announcement is shown at once, below what ranks printed before it, and goes in the end, or stays."""
    shown, page = board()
    shown.feed(0, "stream", stream("before\n"))
    shown.announce([1], "waits")
    assert page.lines() == ["rank 0 │ before", "rank 1 │ waits"]
    shown.announce([1], "too long", stays=True)
    shown.refresh(final=True)
    assert page.lines() == ["rank 0 │ before", "rank 1 │ too long"]


def test_a_terminal_gets_prefixed_lines() -> None:
    """Every line carries its rank, progress bars come once, stderr stays stderr."""
    written: list[tuple[str, str]] = []
    shown = LineBoard(lambda name, text: written.append((name, text)))
    shown.feed(0, "stream", stream("hello\nwor"))
    shown.refresh()
    shown.feed(0, "stream", stream("ld\n"))
    shown.feed(1, "stream", stream("\r50%|#", "stderr"))
    shown.feed(1, "stream", stream("\r100%|##", "stderr"))
    shown.refresh(final=True)
    assert written == [("stdout", "[rank 0] hello"), ("stdout", "[rank 0] world"), ("stderr", "[rank 1] 100%|##")]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from(["a\n", "b\n", "c", "\n"]), max_size=6)), max_size=12
    )
)
def test_every_rank_keeps_its_lines_in_order(messages: list[tuple[int, list[str]]]) -> None:
    """Whatever ranks print and however it joins, the rows of each rank are its own lines in its own order."""
    shown, _ = board()
    printed: dict[int, str] = {0: "", 1: "", 2: ""}
    for rank, texts in messages:
        for text in texts:
            shown.feed(rank, "stream", stream(text))
            printed[rank] += text
        shown.refresh()
    shown.refresh(final=True)
    rows = [row for block in shown._rows.blocks for row in block.rows]
    for rank, text in printed.items():
        assert [row.text for row in rows if rank in row.ranks] == text.splitlines()
