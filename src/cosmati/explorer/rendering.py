"""The Jinja2 environment of all pages: the bundle's and the server's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cosmati.errors import MissingExtraError
from cosmati.explorer.palette import DARK, LIGHT, css_variables
from cosmati.explorer.wording import number

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
THEMES = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}


def template_environment() -> jinja2.Environment:
    """Return the environment. It escapes all text, and refuses names that a page wasn't given.

    Raises:
        MissingExtraError: Jinja2 isn't installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise missing("Jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(number=number, themes=THEMES)
    return environment


def embedded_json(value: object) -> str:
    """Return JSON that is safe inside a script element: it holds no `<`, `>` or `&`. What isn't finite is null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # looked for only where there is any
        text = json.dumps(_with_nulls(value), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _with_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def safe_markup(text: str) -> str:
    """Return text that is put into a page as it stands: what `embedded_json` made, or a script of ours."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704


def plotly_source() -> str:
    """Return the script that ships inside the plotly wheel; see `plotly_path`."""
    return plotly_path().read_text(encoding="utf-8")


def plotly_path() -> Path:
    """Return the path of the script that ships inside the plotly wheel.

    Raises:
        MissingExtraError: Plotly isn't installed.
    """
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise missing("Plotly")
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def missing(name: str) -> MissingExtraError:
    """Return the error that names what isn't installed, and how it is."""
    return MissingExtraError(f"The page needs {name}, which isn't installed. Run: pip install 'cosmati[explorer]'")
