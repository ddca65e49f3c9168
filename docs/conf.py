"""Sphinx: Markdown pages through myst-parser, the furo theme, warnings as errors (`make docs`)."""

import tilewright

project = "tilewright"
author = "the tilewright authors"
release = version = tilewright.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"tilewright {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
