"""`make handouts`: two pages for students, as HTML and as PDF. Run as `handouts.py FOLDER`.

The templates are in `teach/handouts`. Options come from the magics, the bars' meanings from the dashboard's guide, the
pictures from `pictures.py`; Chromium prints the pages.
"""

import argparse
import html
import re
import shutil
import sys
from pathlib import Path

import option_tables
import pictures

import ddp_lab

_HERE = Path(__file__).parent
NAMES = ("magics", "timeline")
_TEMPLATES = _HERE / "teach" / "handouts"
_PLACE = re.compile(r"\{\{(\w+)(?: of | )?([^}]*)\}\}")
_BAR = re.compile(r"^\| (\d) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>
{style}</style></head>
<body>
{body}</body>
</html>
"""


def page(name):
    """A handout as one HTML page that needs nothing else.

    Raises:
        KeyError: the template names something that is not there.
    """
    body = (_TEMPLATES / f"{name}.html").read_text(encoding="utf-8")
    title = re.search(r"<h1>(.+?)</h1>", body)[1]
    filled = _PLACE.sub(lambda found: _MAKERS[found[1]](found[2]), body)
    return _PAGE.format(title=title, style=(_TEMPLATES / "handout.css").read_text(encoding="utf-8"), body=filled)


def options(magic):
    """The options of a magic, with their defaults."""
    rows = []
    for named, default, meaning in option_tables.options(option_tables.parser_of(magic)):
        shown = f" (default: {default})" if default not in ("off", "none", "required") else ""
        first = re.sub(r"(--[\w-]+), --[\w-]+", r"\1", named)  # of two long names
        short = re.sub(r"\{(.+?)\}", lambda one: one[1].replace(",", "|"), first)
        rows.append((_inline(f"`{short}`"), _inline(f"{meaning}{shown}")))
    return _table(rows)


def commands(magic):
    """The commands of a magic, each with its description."""
    parser = option_tables.parser_of(magic)
    [choices] = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    described = [(one.dest, parser._get_formatter()._expand_help(one)) for one in choices._choices_actions]
    return _table((_inline(f"`{name}`"), _inline(meaning)) for name, meaning in described)


def bars(_):
    """The kinds of bars, as the dashboard's guide explains them."""
    guide = (_HERE / "guide" / "dashboard.md").read_text(encoding="utf-8")
    rows = [map(_inline, row) for row in _BAR.findall(guide)]
    return _table([("", "<b>bar</b>", "<b>it means</b>", "<b>if it is long</b>"), *rows])


_MAKERS = {
    "version": lambda _: ddp_lab.__version__,
    "options": options,
    "commands": commands,
    "bars": bars,
    "picture": lambda name: getattr(pictures, name)(),
}


def _inline(text):
    """Markdown of a table's cell as HTML; of a link, its text remains."""
    text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"<i>\1</i>", html.escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _table(rows):
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return "<table>\n" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"


def write(folder):
    """Writes the HTML pages, and prints each to a PDF beside it.

    Raises:
        SystemExit: Playwright or Chromium is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.html").write_text(page(name), encoding="utf-8")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit(
            f"wrote the HTML pages in {folder}, but no PDF: missing Chromium (Debian: apt install chromium)"
        )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SystemExit("the PDFs need Playwright: run `pip install playwright`") from None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            for name in NAMES:
                shown = browser.new_page()
                shown.goto((folder / f"{name}.html").resolve().as_uri())
                shown.pdf(path=folder / f"{name}.pdf", prefer_css_page_size=True, print_background=True)
        finally:
            browser.close()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write(target)
    print(f"wrote {', '.join(str(target / f'{name}.pdf') for name in NAMES)}")
