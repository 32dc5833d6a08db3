"""The settings of the documentation site, which `scripts/site` builds."""

import re
from typing import Any

import fairtrial

project = "Fairtrial"
author = "The Fairtrial developers"
release = version = fairtrial.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["docs/README.md", "docs/site"]
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
default_role = "code"  # Docstrings mark code by single backquotes.
suppress_warnings = ["misc.highlighting_failure"]  # Blocks of CSV.
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"Fairtrial {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
templates_path = ["templates"]
html_additional_pages = {"404": "404.html"}
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
# Nothing is loaded from elsewhere: the fonts are those of the reader's system, and formulas are not typeset.
pygments_style = "default"


CODE = re.compile(r"(`[^`]+`)")


def plain_text(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Make plain text of docstrings what reStructuredText reads as such: only backquotes mean something."""
    for number, line in enumerate(lines):
        parts = CODE.split(line)
        parts[::2] = [re.sub(r"(?<![\s(*])\*|\*(?=[\s,])|\|", r"\\\g<0>", part) for part in parts[::2]]
        parts[2::2] = [re.sub(r"^(?=\w)", r"\\ ", part) for part in parts[2::2]]
        lines[number] = "".join(parts)


def setup(app: Any) -> None:
    """Connect what the settings alone cannot do; before `napoleon`, which runs at 500."""
    app.connect("autodoc-process-docstring", plain_text, priority=400)
