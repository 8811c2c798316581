# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings. Everything that a page shows is made offline, at build time."""

from __future__ import annotations

import os
import pathlib
import sys

_DOCS = pathlib.Path(__file__).parent
_ROOT = _DOCS.parent
sys.path.insert(0, os.fspath(_ROOT))

from docs._ext import cells  # noqa: E402 - needs the path above
from replicator.version import __version__ as release  # noqa: E402

project = "Replicator"
author = "The Replicator authors"
project_copyright = "The Replicator authors. Apache License 2.0"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs._ext.reference",
    "docs._ext.flags",
    "docs._ext.names_in_text",
    "docs._ext.links",
    "docs._ext.search",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

# --- Layout ---------------------------------------------------------------------------

html_theme = "furo"
html_title = "Replicator"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_use_index = False  # the search, and a page per name, replace it
pygments_style = "friendly"
pygments_dark_style = "monokai"

# --- Markdown, and its cells ----------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline", "substitution"]
myst_substitutions = {"version": release}
myst_heading_anchors = 3
nb_custom_formats = {".md": "docs._ext.cells.read"}
nb_execution_mode = os.environ.get("CELLS", "cache")  # "off" shows pages without output
# A folder for each state of the code that determines the cells' output.
nb_execution_cache_path = cells.cache(_ROOT)
nb_execution_in_temp = True  # cells write files to a temporary folder
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables that cells make
cells.prepare(_DOCS / "_build" / "kernel", _ROOT)

# --- Docstrings -----------------------------------------------------------------------

smartquotes = False  # "sum" is a value, and --mode a flag
nitpicky = True
# Names of other libraries have no pages here, and no network resolves them.
nitpick_ignore_regex = [("py:.*", r"(?!replicator\.).*")]
# Our types that user programs never name.
nitpick_ignore = [
    ("py:class", "replicator.compressors.memory.StateStore"),
    ("py:class", "replicator.graph.ir.placeholder.OperandPolicy"),
    ("py:class", "replicator.cluster.description.Description"),
    ("py:class", "replicator._tf.autograph.LeftAsItIs"),
    ("py:class", "replicator.hosts.resilient._Result"),  # a type variable
    ("py:class", "replicator.step.objects._Object"),  # another
]
default_role = "api"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 68
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Example", "examples")]
