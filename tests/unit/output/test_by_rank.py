"""Each rank's output by itself: what is sent to a page that asks for it, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_lab.output.board import OutputBoard
from ddp_lab.output.by_rank import KeptCells, OutputByRank, SwitchableBoard

ERROR = {
    "ename": "ValueError",
    "evalue": "bad",
    "traceback": ["\x1b[31m-----\x1b[39m", "\x1b[31mValueError\x1b[39m: bad"],
}


class Page:
    """What a page knows after the messages that it got."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._blocks: dict[int, dict[int, Any]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Takes a message, as `static/app/output_views.js` does."""
        self.messages.append(message)
        if message["whole"]:
            self._blocks.clear()
        for rank, found in message["blocks"].items():
            self._blocks.setdefault(rank, {}).update(found)

    def data(self, rank: int) -> list[Mapping[str, Any]]:
        """What it shows of a rank, from top to bottom, empty texts left out."""
        blocks = sorted(self._blocks[rank].items())
        return [block["data"] for _, block in blocks if block["data"] != {"text/plain": ""}]

    def text(self, rank: int) -> str:
        """Its plain text."""
        return "\n".join(data["text/plain"] for data in self.data(rank))

    @property
    def groups(self) -> list[list[int]]:
        """Ranks that it shows together."""
        groups: list[list[int]] = self.messages[-1]["groups"]
        return groups


class Nothing:
    """Shows nothing."""

    def publish(self, key: str, data: Mapping[str, Any], metadata: Mapping[str, Any], update: bool) -> None:
        """See `BlockDisplay`."""


def prints(cell: OutputByRank | SwitchableBoard, rank: int, text: str, stream: str = "stdout") -> None:
    cell.feed(rank, "stream", {"name": stream, "text": text})


def figure(data: str, handle: str = "") -> dict[str, Any]:
    return {"data": {"image/png": data, "text/plain": "<Figure>"}, "transient": {"display_id": handle}}


def test_ranks_are_apart_until_the_end() -> None:
    """A rank's text is as it printed it; only stderr has a mark in front. While the cell runs each rank is by itself,
    then those with the same output are together; ranks that said nothing are not there."""
    cell, page = OutputByRank([0, 1]), Page()
    for rank in (0, 1):
        prints(cell, rank, f"epoch 1\n  loss {rank}\n")
    prints(cell, 1, "careful\n", "stderr")
    cell.open(page.take)
    assert page.text(0) == "epoch 1\n  loss 0"
    assert page.text(1) == "epoch 1\n  loss 1\n┃ careful"
    cell, page = OutputByRank(range(6)), Page()
    for rank in range(5):
        prints(cell, rank, "same\n" if rank < 4 else "own\n")
    cell.open(page.take)
    assert page.groups == [[0], [1], [2], [3], [4]]
    assert not page.messages[-1]["ended"]
    cell.refresh(final=True)
    assert page.groups == [[0, 1, 2, 3], [4]]
    assert page.messages[-1]["ended"]


def test_only_changes_are_sent_to_a_page_that_has_asked() -> None:
    """Nothing before a page asks; then everything, then what has changed; nothing after the page closed it."""
    cell, page = OutputByRank([0, 1]), Page()
    prints(cell, 0, "one\n")
    cell.refresh()
    assert page.messages == []
    cell.feed(0, "display_data", figure("AAAA"))
    cell.open(page.take)
    prints(cell, 1, "two\n")
    cell.refresh()
    cell.refresh()
    assert [set(message["blocks"]) for message in page.messages] == [{0}, {1}]
    prints(cell, 0, "three\n")
    cell.refresh()
    assert list(page.messages[-1]["blocks"][0]) == [2]  # the text below the figure, not the figure
    assert page.data(0)[1]["image/png"] == "AAAA"
    cell.close()
    prints(cell, 0, "four\n")
    cell.refresh(final=True)
    assert len(page.messages) == 3
    cell.open(page.take)
    assert page.text(0).endswith("three\nfour")


def test_a_flood_is_bounded() -> None:
    """Of 20 ranks with 20,000 lines each few are kept and sent, with a note where the others are."""
    ranks = range(20)
    cell, page = OutputByRank(ranks), Page()
    for part in range(20):
        for rank in ranks:
            prints(cell, rank, "".join(f"line {1_000 * part + number}\n" for number in range(1_000)))
        cell.know("all lines are in a file")
        cell.refresh()
    cell.open(page.take)
    live = page.text(19).splitlines()
    assert (len(live), live[0], live[-1]) == (21, "line 0", "line 19999")
    assert "19,980 lines not shown here" in page.text(19)
    cell.refresh(final=True)
    ended = page.text(0).splitlines()  # on all ranks the same
    assert (len(ended), ended[100]) == (501, "… 19,500 lines not shown here; all lines are in a file …")
    assert cell.size < 500_000


def test_figures_are_replaced_cleared_and_bounded() -> None:
    """As in the merged output: an update replaces, `clear_output` removes, and too many are text."""
    cell, page = OutputByRank([0, 1]), Page()
    cell.feed(0, "display_data", figure("AAAA", "handle"))
    cell.open(page.take)
    cell.feed(0, "update_display_data", figure("BBBB", "handle"))
    cell.refresh()
    assert [data.get("image/png") for data in page.data(0)] == ["BBBB"]
    cell.feed(0, "clear_output", {"wait": False})
    for number in range(150):
        cell.feed(0, "display_data", figure(f"{number:04}"))
    cell.refresh(final=True)
    shown = [data["image/png"] for data in page.data(0) if "image/png" in data]
    assert shown == [f"{number:04}" for number in range(100)]
    assert "not drawn: a cell shows at most 100" in page.text(0)


def test_errors_and_messages() -> None:
    """Errors are in their ranks' output, with how the rank ended, and without their rule of dashes. A message about the
    cell is with the ranks that it is about; one that does not stay is removed at the end."""
    cell, page = OutputByRank([0, 1, 2]), Page()
    prints(cell, 0, "before\n")
    cell.feed(1, "error", ERROR)
    cell.end({0: "unblocked", 1: "failed", 2: "done"})
    cell.open(page.take)
    assert page.data(1) == [
        {"application/vnd.jupyter.stderr": "\x1b[31mValueError\x1b[39m: bad", "text/plain": "ValueError: bad"}
    ]
    assert page.messages[-1]["states"] == {0: "unblocked", 1: "failed"}
    cell, page = OutputByRank([0, 1]), Page()
    cell.open(page.take)
    cell.announce([0, 1], "waits for cell 3")
    cell.announce([1, 7], "a new process", stays=True)
    cell.refresh()
    assert page.text(0) == "waits for cell 3"
    cell.refresh(final=True)
    assert page.text(1) == "a new process"
    assert page.text(0) == ""


def test_the_switch_and_the_cells_that_are_kept() -> None:
    """Not for one rank, not for messages about the cell, not for an interrupt; and once. Two hundred, or fewer if they
    are large; the newest in any case."""
    placed: list[OutputByRank] = []
    by_rank = OutputByRank([0, 1, 2])
    board = SwitchableBoard(OutputBoard(Nothing()), by_rank, placed.append)
    prints(board, 0, "alone\n")
    board.announce([1, 2], "waits")
    board.feed(2, "error", {"ename": "KeyboardInterrupt", "evalue": "", "traceback": []})
    board.refresh()
    assert placed == []
    board.feed(1, "error", ERROR)
    board.refresh()
    prints(board, 2, "later\n")
    board.refresh(final=True)
    assert placed == [by_rank]
    cells = KeptCells()
    names = [cells.add(OutputByRank([0, 1])) for _ in range(201)]
    assert cells.get(names[0]) is None
    assert None not in [cells.get(name) for name in names[1:]]
    large = OutputByRank([0, 1])
    prints(large, 0, "x" * 60_000_000)
    large.refresh(final=True)
    large.size = 60_000_000
    kept = cells.add(large)
    assert cells.get(kept) is large
    assert cells.get(names[-1]) is None
    last = cells.add(OutputByRank([0, 1]))
    assert cells.get(kept) is None
    assert cells.get(last) is not None


def test_the_merged_output_is_what_it_is_without_the_switch() -> None:
    """Errors and the ends of ranks change nothing there."""
    shown: list[list[Any]] = [[], []]

    class Kept:
        def __init__(self, to: list[Any]) -> None:
            self.to = to

        def publish(self, key: str, data: Mapping[str, Any], metadata: Mapping[str, Any], update: bool) -> None:
            self.to.append((key.partition("-")[0], data, metadata, update))

    alone = OutputBoard(Kept(shown[0]))
    both = SwitchableBoard(OutputBoard(Kept(shown[1])), OutputByRank([0, 1]), lambda _: None)
    for board in (alone, both):
        for rank in (0, 1):
            board.feed(rank, "stream", {"name": "stdout", "text": f"epoch 1\nloss {rank}\n"})
            board.feed(rank, "display_data", figure(f"AAA{rank}"))
        board.feed(1, "error", ERROR)
        board.end({0: "done", 1: "failed"})
        board.refresh(final=True)
        board.show_again()
    assert shown[0] == shown[1] != []
    assert alone.last_lines() == both.last_lines() != ""
