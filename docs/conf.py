"""Sphinx configuration. Build with `make docs`."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from cards.cards import write_cards

from cosmati.explorer.palette import DARK, LIGHT, Palette, css_variables

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Cosmati"
author = "The Cosmati authors"
copyright = "2026, The Cosmati authors"
release = version = installed_version("cosmati")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "Cosmati"
html_logo = html_favicon = "images/mark.svg"
html_static_path = ["_static"]
html_css_files = ["cosmati.css"]


def theme_variables(palette: Palette) -> dict[str, str]:
    """Return the stones' colours for the theme's own variables and for the pictures of the cards."""
    own = {name.removeprefix("--"): value for name, value in css_variables(palette).items()}
    links = {f"color-brand-{part}": palette.accent for part in ("primary", "content", "visited")}
    grounds = {"color-background-primary": palette.surface, "color-background-secondary": palette.paper}
    return own | links | grounds


html_theme_options = {
    "light_css_variables": theme_variables(LIGHT),
    "dark_css_variables": theme_variables(DARK),
}

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["securesystemslib", "tuf"]  # of the extra `authority`
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_heading_anchors = 3

# Docstrings are written to be read in the source, so they aren't reStructuredText: what follows makes them so.
SECTION = re.compile(r"(Args|Attributes|Examples?|Notes?|Raises|References?|Returns|Yields):$")
ITEM = re.compile(r"([-*+]|\d+\.|>>>) ")
MARKED = re.compile(r"(`+[^`]+`+|(?<![\w*])\*\w[^*\n]*\*(?![\w*]))")


def escape(text: str) -> str:
    """Quote code in backticks as code, keep *emphasis*, and let every other character stand for itself."""
    parts = MARKED.split(text)
    for i, part in enumerate(parts):
        if part.startswith("`"):
            glued = parts[i + 1][:1].isalnum()
            parts[i] = f"``{part.strip('`')}``" + ("\\ " if glued else "")
        elif not i % 2:
            parts[i] = re.sub(r"(?<=[^\s])\*|\*(?=\S)|[|\\]|_(?!\w)", r"\\\g<0>", part)
    return "".join(parts)


def read_as_plain_text(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Turn a docstring (plain text, code in backticks, drawings indented) into reStructuredText."""
    blocks: list[tuple[bool, list[str]]] = []
    opened = drawing = False
    for line in lines:
        if line and not line.startswith(" "):
            opened = bool(SECTION.match(line) or ITEM.match(line))
            drawing = False
        elif line:
            drawing = not opened
        if not blocks or blocks[-1][0] != drawing:
            blocks.append((drawing, []))
        blocks[-1][1].append(line)
    text: list[str] = []
    for drawing, block in blocks:
        # Two colons in a row would make the second pair the drawing, and the drawing text.
        announced = "".join(text[-2:]).endswith("::")
        mark = [""] if announced else ["", "::", ""]
        text += [*mark, *block, ""] if drawing else escape("\n".join(block)).split("\n")
    lines[:] = text


# Pages hold pictures as GitHub wants them: one for each colour scheme of the system. Furo has a switch of its own, and
# Sphinx copies only the pictures that it knows of.
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)"(?: width="(?P<width>\d+)")?>\s*</picture>'
)


def show_one_picture_a_theme(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Turn `<picture>` into two images, of which the theme shows one."""

    def images(found: re.Match[str]) -> str:
        width = f":width: {found['width']}px\n" if found["width"] else ""
        return "".join(
            f"```{{image}} {found[theme]}\n:class: only-{theme}\n:alt: {found['alt']}\n{width}```\n"
            for theme in ("light", "dark")
        )

    source[0] = PICTURE.sub(images, source[0])


# A room re-exports names of its files, so a bare name in an annotation may have two targets; either one is right.
suppress_warnings = ["ref.python"]


def setup(app: Sphinx) -> None:
    """Write the method cards, and read docstrings before napoleon looks for their sections."""
    write_cards(Path(app.srcdir) / "methods")
    app.connect("source-read", show_one_picture_a_theme)
    app.connect("autodoc-process-docstring", read_as_plain_text, priority=100)
