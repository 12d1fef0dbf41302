"""Sphinx's configuration: `make docs` builds the pages into docs/_build, with warnings as errors, without a network."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from docstrings import as_restructured_text, without_fields  # noqa: E402
from pictures import draw_all  # noqa: E402

import pipeback  # noqa: E402

project = "pipeback"
author = "pipeback authors"
copyright = "pipeback authors, Apache-2.0"
version = release = pipeback.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "_static", "results/data"]
source_suffix = {".md": "markdown"}
default_role = "code"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Links into the documentation of Python, torch and Lightning need their inventories, which are on the network.
# A build has to work without one, so they are made only when they are asked for: INTERSPHINX=1 make docs
if os.environ.get("INTERSPHINX") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    }

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88  # one argument per line where a signature is longer
python_display_short_literal_types = True

PARTS = ("tutorials", "how-to", "reference", "explanation", "contributing")

html_theme = "pydata_sphinx_theme"
html_title = f"pipeback {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False
html_sidebars = {"index": []}
html_theme_options = {
    "show_toc_level": 2,
    "secondary_sidebar_items": {"results/*": []} | {f"{part}/**": ["page-toc"] for part in PARTS},
    "navigation_with_keys": False,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def setup(app):
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("autodoc-skip-member", without_fields)
    draw_all(HERE / "_static" / "pictures")
