"""The visual debugger's pure parts: lines at which a rank can stop, and what the next rank is told."""

from __future__ import annotations

from ddp_lab.engine.debugger.rank_debugger import lines_of_code
from ddp_lab.notebook.debugger import FrontEnd


def test_lines_of_code_are_the_notebooks() -> None:
    """Lines count from the magic's on; blank lines, comments and the magic have no code, and functions' lines do. A
    cell that can't be compiled has none: its breakpoints stay where they are."""
    text = "%%distributed --ranks 0\n\nx = 1\n# a comment\ndef f():\n    return x\n!ls\n"
    assert lines_of_code(text) == [3, 5, 6, 7]
    assert lines_of_code("%%distributed\nx = (") == []


def test_what_the_next_rank_is_told() -> None:
    """The newest request of each kind and file, the first two before all others, and that the configuration is done."""
    front = FrontEnd()
    for command, arguments in (
        ("initialize", {}),
        ("setBreakpoints", {"source": {"path": "a"}, "breakpoints": [{"line": 1}]}),
        ("attach", {}),
        ("threads", {}),
        ("setBreakpoints", {"source": {"path": "a"}, "breakpoints": [{"line": 2}]}),
        ("setBreakpoints", {"source": {"path": "b"}, "breakpoints": []}),
        ("dumpCell", {"code": "x"}),
    ):
        front.note({"type": "request", "seq": 1, "command": command, "arguments": arguments})
    told = [(one["command"], one["arguments"].get("breakpoints")) for one in front.requests()]
    assert told == [
        *((name, None) for name in ("initialize", "attach", "dumpCell")),
        *(("setBreakpoints", lines) for lines in ([{"line": 2}], [])),
        ("configurationDone", None),
    ]
