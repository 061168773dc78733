"""What the site adds to Sphinx: pages of source files, folded solutions, cells in colour, formulas, the first page.

Pictures of the views, tables of options, facts about lessons and the gallery come from `pictures.py`,
`option_tables.py`, `class_notes.py` and `gallery.py`.
"""

import contextlib
import functools
import io
import json
import os
import re
from pathlib import Path
from unittest.mock import patch

import class_notes
import gallery
import option_tables
import outputs
import pictures
from docutils import nodes
from docutils.utils.math import latex2mathml
from pygments.lexer import inherit
from pygments.lexers.python import PythonLexer
from pygments.token import Name
from sphinx import addnodes
from sphinx.roles import XRefRole
from sphinx.transforms import SphinxTransform

from ddp_lab.cli import main
from ddp_lab.notebook import magics

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = re.compile(r"(?:ddp_lab|csrc|tests)/[\w./-]+\.(?:py|h|cpp|js|css)")
_LEXERS = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".js": "javascript", ".css": "css"}
_LEXERS |= {".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
_README = re.compile(r'^<!-- README from "(.+)" to "(.+)" -->$', re.MULTILINE)
_PICTURE = re.compile(r'<picture>.*?<img src="([^"]+)" alt="([^"]+)"></picture>', re.DOTALL)
_LIGHT = re.compile(r"!\[([^]]+)\]\(([^)]+)-light\.gif\)")
_HELP = re.compile(r"^<!-- help of (.+) -->$", re.MULTILINE)
_BENCHMARKS = "<!-- benchmarks -->"
_KEYWORDS = re.compile(r"^<!-- keywords: (.+) -->$", re.MULTILINE)
_RELATIVE = re.compile(r"\]\((?!https?://|#)")
_REDIRECT = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>ddp_lab</title><meta http-equiv="refresh" content="0; url={page}"></head>
<body><a href="{page}">ddp_lab</a></body></html>
"""


# -- before a page is read


def on_source_read(app, docname, content):
    """Folds solutions, and takes the outputs of a run; puts the named part of README.md into a page."""
    if app.env.doc2path(docname).suffix == ".ipynb":
        notebook = json.loads(content[0])
        run = _ROOT / app.config.executed / f"{docname}.ipynb"
        app.env.note_dependency(str(run))
        if outputs.of_run(notebook, run):
            outputs.take(notebook, run, "../" * docname.count("/"))
        for cell in notebook["cells"]:
            tags = cell["metadata"].get("tags", [])
            if "solution" in tags:
                cell["metadata"]["tags"] = [*tags, "hide-input"]
        notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "python"}
        content[0] = json.dumps(notebook)
        return
    content[0] = _PICTURE.sub(r"![\2](\1)", content[0])
    # Furo shows the one of the two whose class fits the theme.
    content[0] = _LIGHT.sub(r"![\1](\2-light.gif){.only-light}![\1](\2-dark.gif){.only-dark}", content[0])
    if _README.search(content[0]):
        app.env.note_dependency(str(_ROOT / "README.md"))
        readme = (_ROOT / "README.md").read_text(encoding="utf-8")
        up = "../" * docname.count("/")
        content[0] = _README.sub(lambda found: _part(readme, found[1], found[2], up), content[0])
    if _HELP.search(content[0]) or _BENCHMARKS in content[0]:
        app.env.note_dependency(main.__file__)
        app.env.note_dependency(magics.__file__)
        content[0] = _HELP.sub(lambda found: f"```text\n{_help(found[1])}\n```", content[0])
        rows = [f"| `ddp-lab bench {name}` | {what} |" for name, what in main.BENCHMARKS.items()]
        content[0] = content[0].replace(_BENCHMARKS, "\n".join(rows))
    content[0] = _KEYWORDS.sub(lambda found: f"```{{index}} {_main(found[1])}\n```", content[0])
    content[0] = gallery.filled(option_tables.filled(pictures.filled(class_notes.filled(content[0]))))


def _main(keywords):
    """Main entries of the index: the search lists their page before pages that only have the word."""
    return ", ".join(f"! {keyword.strip()}" for keyword in keywords.split(","))


def _help(command):
    """What a magic or a command prints with --help."""
    printed = io.StringIO()
    name, *rest = command.split()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit), patch.dict(os.environ, COLUMNS="90"):
        if name == "ddp-lab":
            main.main([*rest, "--help"])
        else:
            magics._MAGICS[name.lstrip("%")][1].parse_line(" ".join([*rest, "--help"]))
    return printed.getvalue().strip()


def _part(text, begin, end, up):
    """What stands between two lines of a document, its links as seen from a folder further down."""
    _, found_begin, rest = text.partition(begin)
    part, found_end, _ = rest.partition(f"\n{end}")
    if not found_begin or not found_end:
        raise ValueError(f"README.md has no part from {begin!r} to {end!r}")
    return _RELATIVE.sub(f"]({up}", part)


def leave_out_of_search(app, doctree):
    """The search finds no page that conf.py names in `not_searched`."""
    if app.env.docname in app.config.not_searched:
        app.env.metadata[app.env.docname]["nosearch"] = True


# -- links to source files


class SourceLinks(SphinxTransform):
    """Links to source files, and names of such files in code, lead to pages with their text."""

    default_priority = 400

    def apply(self):
        found = []
        for node in list(self.document.findall(addnodes.download_reference)):
            path = self.env.relfn2path(node["reftarget"], self.env.docname)[0]
            if Path(path).suffix in _LEXERS or (_ROOT / path).suffix == "":
                node.replace_self(self._link(path, node.children) if self.config.source_pages else node.children)
                found.append(path)
        if not self.config.source_pages:
            return
        for node in list(self.document.findall(nodes.literal)):
            path = node.astext()
            if not isinstance(node.parent, nodes.reference) and _SOURCE.fullmatch(path) and (_ROOT / path).is_file():
                node.replace_self(self._link(path, [node.deepcopy()]))
                found.append(path)
        _linked(self.env)[self.env.docname] = found

    def _link(self, path, children):
        up = "../" * self.env.docname.count("/")
        return nodes.reference("", "", *children, refuri=f"{up}source/{path}.html", internal=True)


def _linked(env):
    """Page -> the source files that it links to."""
    if not hasattr(env, "ddp_lab_sources"):
        env.ddp_lab_sources = {}
    return env.ddp_lab_sources


def forget(app, env, docname):
    """Of a page that is read anew, or is gone."""
    _linked(env).pop(docname, None)


def merge(app, env, docnames, other):
    """Of pages that were read in another process."""
    _linked(env).update({name: _linked(other)[name] for name in docnames if name in _linked(other)})


def source_pages(app):
    """A page for each file that some page links to."""
    for path in sorted({path for paths in _linked(app.env).values() for path in paths}):
        text = (_ROOT / path).read_text(encoding="utf-8")
        code = app.builder.highlighter.highlight_block(text, _LEXERS.get(Path(path).suffix, "none"), linenos="inline")
        yield f"source/{path}", {"title": path, "body": f"<h1><code>{path}</code></h1>{code}"}, "page.html"


def one_tree_a_folder(trees, app, name, template, context, doctree):
    """Source pages of a folder share their tree of links: to make it takes longer than all else of a page.

    Args:
        trees: of the folders that had a page already.
        app, name, template, context, doctree: as Sphinx hands them over.
    """
    if not name.startswith("source/"):
        return
    make, folder = context["toctree"], name.rpartition("/")[0]

    def toctree(**how):
        asked = folder, *sorted(how.items())
        if asked not in trees:
            trees[asked] = make(**how)
        return trees[asked]

    context["toctree"] = toctree


# -- names in docstrings


class NameRole(XRefRole):
    """`name` in a docstring: a link if it is documented, else code."""

    def process_link(self, env, refnode, has_explicit_title, title, target):
        refnode["ours"] = True
        refnode["py:module"] = env.ref_context.get("py:module")
        refnode["py:class"] = env.ref_context.get("py:class")
        return title, target.removesuffix("()")


class PythonName(NameRole):
    def __call__(self, name, rawtext, text, lineno, inliner, options=None, content=()):
        return super().__call__("py:obj", rawtext, text, lineno, inliner, options or {}, content)


def on_missing_reference(app, env, node, contnode):
    """A name that is not documented is just code."""
    return contnode if node.get("ours") else None


# -- how things look


class CellLexer(PythonLexer):
    """Python with lines of IPython's magics."""

    tokens = {"root": [(r"^[ \t]*(%%?\w|!(?!=)).*$", Name.Decorator), inherit]}  # noqa: RUF012


def math(self, node):
    """A formula as MathML, which browsers show without a script."""
    block = isinstance(node, nodes.math_block)
    made = latex2mathml.tex2mathml(node.astext(), as_block=block)
    self.body.append(f'<div class="math">{made}</div>' if block else made)
    raise nodes.SkipNode


def first_page(app, exception):
    """build/docs/index.html leads to the first page."""
    if exception is None and app.builder.format == "html":
        page = app.builder.get_target_uri(app.config.root_doc)
        (Path(app.outdir) / "index.html").write_text(_REDIRECT.format(page=page), encoding="utf-8")


def reports(app, exception):
    """Writes the reports of the gallery beside its page."""
    if exception is None and app.builder.format == "html":
        target = app.builder.get_target_uri(str(gallery.PAGE.relative_to(_ROOT).with_suffix("")))
        gallery.write_reports(Path(app.outdir, target).with_suffix(""))


def setup(app):
    app.add_config_value("executed", "build/executed", "env", str)
    app.add_config_value("source_pages", True, "env", bool)
    app.add_config_value("not_searched", [], "env", list)
    app.connect("source-read", on_source_read)
    app.connect("doctree-read", leave_out_of_search)
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", functools.partial(one_tree_a_folder, {}), priority=400)  # before Furo asks for it
    app.connect("missing-reference", on_missing_reference)
    app.connect("build-finished", first_page)
    app.connect("build-finished", reports)
    app.add_transform(SourceLinks)
    app.add_role("name", PythonName(innernodeclass=nodes.literal))
    app.add_lexer("python", CellLexer)
    app.add_html_math_renderer("mathml", (math, None), (math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
