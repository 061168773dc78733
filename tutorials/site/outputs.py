"""What cells show on the site: runs the notebooks, and makes of their outputs what a page without a kernel can show.

`python tutorials/site/outputs.py FOLDER` runs each notebook whose cells have changed since it was last run, and writes
it to FOLDER. A page takes its outputs from there if they are of the cells that it shows; else it has none.
"""

import json
import re
import sys
import time
from pathlib import Path

import plotly
import plotly.io

_ROOT = Path(__file__).resolve().parents[2]
_WIDGET = "application/vnd.jupyter.widget-view+json"
_FIGURE = "application/vnd.plotly.v1+json"
_SHOWN = ("text/html", "image/svg+xml", "image/png", "text/plain")
_PICTURE = "ddp-lab-static-"  # in the HTML of the picture that follows a live view
_LESSON = re.compile(r'<a href="([\w./]+)\.ipynb#([\w-]+)"')
PAGES = (  # not a reader's own
    "notebooks/quickstart.ipynb",
    "notebooks/hosted.ipynb",
    "notebooks/paper_*.ipynb",
    "tutorials/[0-9][0-9]_*.ipynb",
    "tutorials/[A-Z]_*.ipynb",
)
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


def of_run(notebook, run):
    """Whether `run`, the path of a notebook that was run, has these cells."""
    return run.is_file() and _sources(json.loads(run.read_text(encoding="utf-8"))) == _sources(notebook)


def _sources(notebook):
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


# -- on a page


def take(notebook, run, up):
    """Gives the cells of a notebook the outputs of its run, but for solutions, which are folded.

    Args:
        notebook: as JSON; its code cells are changed.
        run: where the notebook that was run is.
        up: from the page to the site's root: "../", say.
    """
    script = f"{up}_static/{PLOTLY.name}"
    for cell, done in zip(notebook["cells"], json.loads(run.read_text(encoding="utf-8"))["cells"], strict=True):
        if cell["cell_type"] != "code" or "solution" in cell["metadata"].get("tags", []):
            continue
        cell["outputs"] = _still(done["outputs"])
        for output in cell["outputs"]:
            if _FIGURE in output.get("data", {}):
                output["data"] = {"text/html": _drawn(output["data"][_FIGURE], script)}
                script = False  # once is enough for a page


def _still(outputs):
    """Outputs without live views: of those with a picture the picture stays, of others the words."""
    pictured = any(_PICTURE in "".join(one.get("data", {}).get("text/html", "")) for one in outputs)
    kept = []
    for output in outputs:
        data = output.get("data")
        if data is None:  # printed, or an error
            kept.append(output)
            continue
        live = data.pop(_WIDGET, None) is not None
        output["data"] = {kind: data[kind] for kind in (_FIGURE, *_SHOWN) if kind in data}
        if "text/html" in data:
            output["data"]["text/html"] = _LESSON.sub(_to_page, "".join(data["text/html"]))
        if not live or not pictured:
            kept.append(output)
    return kept


def _to_page(link):
    """A link that leads from one notebook to another's heading, as one between their pages."""
    return f'<a href="{link[1]}.html#{link[2].lower()}"'


def _drawn(figure, script):
    """The HTML of a plotly figure."""
    figure["layout"].setdefault("autosize", True)
    config = {"responsive": True, "displayModeBar": False}
    return plotly.io.to_html(figure, config=config, include_plotlyjs=script, full_html=False, validate=False)


# -- the run


def main(folder):
    """Runs what has changed. An error in a cell ends it, and names notebook and cell."""
    import nbformat

    from ddp_lab.cli.main import run_notebook

    for path in sorted(path.relative_to(_ROOT) for pattern in PAGES for path in _ROOT.glob(pattern)):
        run = folder / path
        stored = (_ROOT / path).read_text(encoding="utf-8")
        if of_run(json.loads(stored), run):
            continue
        print(f"running {path}: ", end="", flush=True)
        began = time.monotonic()
        notebook = nbformat.reads(stored, as_version=4)
        run_notebook(notebook, (_ROOT / path).parent)
        run.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, run)
        print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
