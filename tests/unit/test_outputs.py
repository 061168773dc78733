"""What a board shows of several ranks' outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.client.lines import plain
from ddp_lab.client.outputs import LineBoard, OutputBoard


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


def test_equal_lines_of_several_ranks_are_shown_once() -> None:
    """Lines that all ranks print carry the label of all, others that of their rank."""
    shown, page = board()
    for rank in range(4):
        shown.feed(rank, "stream", stream(f"epoch 1\nloss {rank}\n"))
    shown.refresh(final=True)
    assert page.lines() == ["ranks 0–3 │ epoch 1", *(f"   rank {rank} │ loss {rank}" for rank in range(4))]


def test_a_late_rank_joins_the_row_of_the_others() -> None:
    """A line that was shown for one rank gets the second rank's label when that prints it too."""
    shown, page = board()
    shown.feed(0, "stream", stream("one\ntwo\n"))
    shown.refresh()
    assert page.lines() == ["rank 0 │ one", "       │ two"]
    shown.feed(1, "stream", stream("one\ntwo\n"))
    shown.refresh(final=True)
    assert page.lines() == ["ranks 0–1 │ one", "          │ two"]
    assert page.updates == 1


def test_equal_lines_after_different_ones_are_joined() -> None:
    """A rank's own lines move above the next line that it shares."""
    shown, page = board()
    for rank in range(3):
        shown.feed(rank, "stream", stream(f"begin\nown {rank}\nend\n"))
    shown.refresh(final=True)
    own = [f"   rank {rank} │ own {rank}" for rank in range(3)]
    assert page.lines() == ["ranks 0–2 │ begin", *own, "ranks 0–2 │ end"]


def test_repeated_lines_are_not_swallowed() -> None:
    """A rank that prints the same line three times has three rows."""
    shown, page = board()
    shown.feed(0, "stream", stream("x\nx\nx\n"))
    shown.feed(1, "stream", stream("x\n"))
    shown.refresh(final=True)
    assert page.lines() == ["ranks 0–1 │ x", "   rank 0 │ x", "          │ x"]


def test_a_line_that_grows_joins_when_it_is_complete() -> None:
    """Text without a newline is shown at once and joins an equal line when it ends."""
    shown, page = board()
    shown.feed(0, "stream", stream("loading... "))
    shown.feed(1, "stream", stream("loading... done\n"))
    shown.refresh()
    assert page.lines() == ["rank 0 │ loading...", "rank 1 │ loading... done"]
    shown.feed(0, "stream", stream("done\n"))
    shown.refresh(final=True)
    assert page.lines() == ["ranks 0–1 │ loading... done"]


def test_progress_bars_stay_one_row_for_each_rank() -> None:
    """Rewritten lines are updated in place and never shared."""
    shown, page = board()
    for percent in (0, 50, 100):
        for rank in (0, 1):
            shown.feed(rank, "stream", stream(f"\r{percent}%|", "stderr"))
        shown.refresh()
    assert page.lines() == ["rank 0 │ 100%|", "rank 1 │ 100%|"]


def test_values_are_marked() -> None:
    """The last expression's value has an arrow, its further lines are aligned."""
    shown, page = board()
    shown.feed(0, "execute_result", bundle(text_plain="tensor([1.,\n        2.])"))
    shown.refresh(final=True)
    assert page.lines() == ["rank 0 → tensor([1.,", "                 2.])"]


def test_rich_outputs_keep_their_bundle() -> None:
    """A figure is displayed unchanged below its label; an equal one of another rank is not repeated."""
    shown, page = board()
    for rank in (0, 1):
        shown.feed(rank, "stream", stream("before\n"))
        shown.feed(rank, "display_data", bundle(image_png="AAAA", text_plain="<Figure>"))
        shown.feed(rank, "stream", stream("after\n"))
    shown.refresh(final=True)
    assert list(page.blocks.values())[1] == {"image/png": "AAAA", "text/plain": "<Figure>"}
    assert page.lines() == ["ranks 0–1 │ before", "ranks 0–1 ▾", "<Figure>", "ranks 0–1 │ after"]


def test_an_update_replaces_a_display() -> None:
    """`update_display` on a rank changes what that rank displayed, and nothing else."""
    shown, page = board()
    for rank in (0, 1):
        shown.feed(rank, "display_data", {**bundle(text_plain="0 of 2"), "transient": {"display_id": "a"}})
    shown.feed(1, "update_display_data", {**bundle(text_plain="2 of 2"), "transient": {"display_id": "a"}})
    shown.refresh(final=True)
    assert page.lines() == ["rank 0 │ 0 of 2", "rank 1 │ 2 of 2"]


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
    """Of ten thousand lines the first and last are shown, and how many are not."""
    shown, page = board()
    for rank in (0, 1):
        for begin in range(0, 10_000, 1_000):
            shown.feed(rank, "stream", stream("".join(f"line {n}\n" for n in range(begin, begin + 1_000))))
    shown.refresh(final=True)
    lines = page.lines()
    assert lines[0] == "ranks 0–1 │ line 0"
    assert lines[-1].endswith("│ line 9999")
    assert len(lines) <= 302
    (note,) = [line for line in lines if "not shown" in line]
    assert f"{10_000 - len(lines) + 1:,} lines" in note


def test_rich_outputs_end_in_rank_order() -> None:
    """Neighbouring figures of different ranks are in rank order once the cell has ended."""
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


def test_nothing_is_published_for_a_silent_cell() -> None:
    """A cell without output leaves no empty display behind."""
    shown, page = board()
    shown.refresh(final=True)
    assert page.blocks == {}


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
    assert written == [
        ("stdout", "[rank 0] hello"),
        ("stdout", "[rank 0] world"),
        ("stderr", "[rank 1] 100%|##"),
    ]


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
