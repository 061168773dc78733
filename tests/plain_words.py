"""`python -m tests.plain_words`, in `make check`: where phrases stand that the style in CONTRIBUTING.md replaces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".js", ".h", ".cpp", ".md", ".ipynb", ".toml"}
HABITS = {
    r"comes? on(?! a\b| the\b)": "make progress",
    r"tells? of": "report, show",
    r"told of": "reported",
    r"(?:by|for) want of": "without, out of",
    r"for ever": "forever",
    r"is no (?:name|script|journal|token)": "is not a ...",
    r"is of no use": "is unusable",
    r"unequally many": "uneven",
    r"run apart": "fall out of step",
    r"That was it": "Summary",
}
HABIT = re.compile("|".join(rf"(\b{one}\b)" for one in HABITS).replace(" ", r"[\s#*/]+"), re.IGNORECASE)


def text_of(path: Path) -> str:
    """What stands in a file; of a notebook, its cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def findings() -> list[str]:
    """A line for each phrase: file, line, what stands there, what to write."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines() if Path(name).suffix in SUFFIXES]
    found = []
    for path in paths:
        if path == Path(__file__).resolve() or not path.is_file():
            continue
        text = text_of(path)
        for match in HABIT.finditer(text):
            better = list(HABITS.values())[(match.lastindex or 1) - 1]
            number = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; better: {better}")
    return found


if __name__ == "__main__":
    lines = findings()
    print("\n".join(lines))
    sys.exit(bool(lines))
