"""The documentation site; `make docs` builds it into build/docs and fetches nothing.

Its source folder is the root of the project, so that README.md, ARCHITECTURE.md and the lessons are pages as they are,
and a link from one to the other is the same in the repository and on the site. `parts.py` adds the rest: links to
source files, folded solutions, formulas without a script; `outputs.py`, what cells have shown.
"""

import ast
import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

import outputs  # noqa: E402

_PACKAGE = ast.parse((_HERE.parents[1] / "ddp_lab" / "_version.py").read_text(encoding="utf-8"))

project = "ddp_lab"
copyright = "the authors of ddp_lab, BSD-3-Clause"
version = release = next(
    ast.literal_eval(line.value)
    for line in _PACKAGE.body
    if isinstance(line, ast.Assign) and getattr(line.targets[0], "id", "") == "__version__"
)

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "parts"]
include_patterns = ["*.md", "tutorials/*.md", "tutorials/site/**", *outputs.PAGES]
exclude_patterns = [".*", "build"]  # Sphinx need not walk through .venv
root_doc = "tutorials/site/index"
highlight_language = "none"
default_role = "name"  # of parts.py: a link where the name is documented, else just code

# -- pages from Markdown and notebooks
nb_execution_mode = "off"  # outputs.py has run them, on real clusters
nb_ipywidgets_js = {}  # would be fetched from the network
nb_render_error_lexer = "none"  # errors of ranks are not plain tracebacks
nb_code_prompt_show = "Show the solution"
nb_code_prompt_hide = "Hide the solution"
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

# -- pages from docstrings
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
# What has no page here: other packages (their documentation is on the network), and our classes behind the public ones.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|dist|nn|numpy|np|npt|pandas|pd|go|plotly|ipywidgets|anywidget|IPython|ipyparallel)(\..*)?"),
    (r"py:.*", r"ddp_lab\.(analysis|bench|cluster|control|dashboard|diagnosis|engine|notebook|output)\..*"),
    (r"py:.*", r"ddp_lab\.(parallel|protocol|simulation|timeline)\..*"),
    (r"py:class", "Model|Dashboard|ClusterPanel|Collectives|DOMWidget"),
    (r"py:.*", r"(os|collections|contextlib|pathlib|types|datetime)\..*|Path|PathLike"),
]

# -- search
html_search_scorer = str(_HERE / "search_scores.js")
# Pages without answers to a user's question: their words would come before the page that has one.
not_searched = ["CHANGELOG", "tutorials/site/inside", "tutorials/site/descriptions", "tutorials/site/teach/notes"]

# -- how it looks
# Furo: plain pages, light and dark, good on a phone; all it shows is in its wheel: no fonts, scripts or styles from
# elsewhere. (pydata-sphinx-theme has them in its wheel, too, but brings Bootstrap and Font Awesome along.)
html_theme = "furo"
html_title = f"ddp_lab {version}"
html_static_path = ["site.css", str(outputs.PLOTLY)]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0b5e8e", "color-brand-content": "#0b5e8e"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}
