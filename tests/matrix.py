"""`make matrix`: the whole suite with several releases of torch, one after another, and a table of what came of it.

`python tests/matrix.py FOLDER RELEASE ...` gives each release an environment and object files of its own below FOLDER,
a path from the project's root, where pytest's reports stay, too. PYTEST_ARGS reaches pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, release: str) -> dict[str, int | str]:
    """Runs `make test` with that release; pytest's counts, and "minutes" of the tests alone."""
    report = ROOT / folder / f"{release}.xml"
    report.unlink(missing_ok=True)
    chosen = f"PYTEST_ARGS=--junitxml={report} {os.environ.get('PYTEST_ARGS', '')}"
    make = ["make", "test", f"TORCH=torch=={release}", f"VENV={folder / release}", chosen]
    environment = {**os.environ, "DDP_LAB_BUILD_DIR": str(folder / "objects")}
    code = subprocess.run(make, cwd=ROOT, env=environment, check=False).returncode
    if not report.exists():
        return {"torch": release, "outcome": f"make ended with exit code {code} before a test ran"}
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    tests, failures, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    return {
        "torch": release,
        "passed": tests - failures - errors - skipped,
        "skipped": skipped,
        "failed": failures + errors if code else 0,
        "unsteady": 0 if code else failures + errors,  # the report has their first run
        "minutes": f"{float(suite.get('time', 0)) / 60:.1f}",
    }


def main(folder: str, *releases: str) -> int:
    """Prints the table; exit code 1 if a test failed."""
    rows = []
    for release in releases:
        print(f"the suite with torch {release}", flush=True)
        rows.append(run(Path(folder), release))
    print("| torch | passed | skipped | failed | unsteady | minutes |\n|---|---|---|---|---|---|")
    for row in rows:
        told = [
            row.get(key, row.get("outcome", ""))
            for key in ("torch", "passed", "skipped", "failed", "unsteady", "minutes")
        ]
        print(f"| {' | '.join(map(str, told))} |")
    return int(any(row.get("failed") != 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
