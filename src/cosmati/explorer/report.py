"""Write finished studies and runs as one HTML file that needs nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from cosmati.errors import MissingExtraError
from cosmati.explorer.figures import Figure
from cosmati.explorer.palette import DARK, LIGHT, css_variables
from cosmati.explorer.views import (
    StudyView,
    environments_of,
    governance_figures,
    group_runs,
    live_data,
    study_figures,
    study_view,
)
from cosmati.records.governance import GovernanceFacts
from cosmati.records.run import RunRecord
from cosmati.records.study import StudyRecord

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    directory: Path,
    *,
    title: str,
    studies: Sequence[StudyRecord],
    runs: Sequence[RunRecord],
    governance: GovernanceFacts | None,
    output: Path,
) -> Path:
    """Write the report page and return its path.

    The page holds its own styles, script, Plotly and data: it makes no request. All text is escaped.

    Args:
        directory: Folder of the report, made if it isn't there.
        title: Title of the page.
        studies: Studies, one section each.
        runs: Runs whose plan, guarantees and environment are shown.
        governance: Policy, contribution, sources and ledger, None for ungoverned runs.
        output: Path of the file, taken from `directory` where it is relative.

    Raises:
        MissingExtraError: Jinja2 or Plotly isn't installed.
    """
    page = render_report(title=title, studies=studies, runs=runs, governance=governance)
    path = directory / output
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def render_report(
    *,
    title: str,
    studies: Sequence[StudyRecord],
    runs: Sequence[RunRecord],
    governance: GovernanceFacts | None,
) -> str:
    """Return the report page as text; see `write_report`."""
    jinja2, markup = _import_jinja()
    views = tuple(study_view(study, f"study-{index}") for index, study in enumerate(studies, start=1))
    figures = {name: figure for view in views for name, figure in study_figures(view).items()}
    if governance is not None:
        figures |= governance_figures(governance)
    loader = jinja2.FileSystemLoader(_TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return str(
        environment.get_template("report.html").render(
            title=title,
            views=views,
            figures=figures,
            groups=group_runs(runs),
            environments=environments_of(runs),
            facts=governance,
            themes={"light": css_variables(LIGHT), "dark": css_variables(DARK)},
            data=markup(embedded_json(_page_data(views, figures))),
            plotly=markup(plotly_source()),
        )
    )


def _page_data(views: Sequence[StudyView], figures: dict[str, Figure]) -> dict[str, Any]:
    shown = {name: {"plot": one.plot, "csv": one.csv} for name, one in figures.items()}
    return {"figures": shown, "studies": {view.anchor: live_data(view) for view in views}}


def embedded_json(value: object) -> str:
    """Return JSON that is safe inside a script element: it holds no `<`, `>` or `&`."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _import_jinja() -> tuple[ModuleType, Any]:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise _missing("Jinja2") from error
    return jinja2, Markup


def plotly_source() -> str:
    """Return the script that ships inside the plotly wheel.

    Raises:
        MissingExtraError: Plotly isn't installed.
    """
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise _missing("Plotly")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _missing(name: str) -> MissingExtraError:
    return MissingExtraError(f"The report needs {name}, which isn't installed. Run: pip install 'cosmati[explorer]'")
