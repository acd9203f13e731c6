"""Write studies and a run as one HTML file that needs nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from cosmati.errors import MissingExtraError, RunError
from cosmati.explorer.evidence import Evidence, shown_claims
from cosmati.explorer.figures import Figure, tradeoff_figure
from cosmati.explorer.palette import DARK, LIGHT, PAGE, css_variables
from cosmati.explorer.run_figures import DASHES, run_figures
from cosmati.explorer.run_view import RunView
from cosmati.explorer.views import (
    StudyView,
    decisions_text,
    live_data,
    promises_of,
    seconds_rows,
    study_figures,
    study_view,
)
from cosmati.explorer.wording import number
from cosmati.records.study import StudyRecord

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    path: str | Path,
    *,
    title: str,
    studies: Sequence[StudyRecord] = (),
    run: RunView | None = None,
    evidence: Evidence | None = None,
) -> Path:
    """Write the report page and return its path.

    The page holds its own styles, script, Plotly and data: it makes no request. All text is escaped.

    Args:
        path: Path of the file; its folder is made if it isn't there.
        title: Title of the page.
        studies: Studies, one section each.
        run: The run whose training, plan, guarantees, policy and ledger are shown.
        evidence: What was measured before and committed, to stand beside the studies.

    Raises:
        MissingExtraError: Jinja2 or Plotly isn't installed. RunError: the file can't be written.
    """
    page, path = render_report(title=title, studies=studies, run=run, evidence=evidence), Path(path).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        msg = f"The page can't be written: {error}. Name another file."
        raise RunError(msg) from error
    return path


def render_report(
    *,
    title: str,
    studies: Sequence[StudyRecord] = (),
    run: RunView | None = None,
    evidence: Evidence | None = None,
) -> str:
    """Return the report page as text; see `write_report`."""
    jinja2, markup = _import_jinja()
    views = tuple(study_view(study, f"study-{index}") for index, study in enumerate(studies, start=1))
    figures = {name: figure for view in views for name, figure in study_figures(view).items()}
    if run is not None:
        figures |= run_figures(run, PAGE)
    if evidence is not None:
        figures |= {f"evidence-{task}": tradeoff_figure(study, PAGE) for task, study in evidence.studies}
    loader = jinja2.FileSystemLoader(_TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return str(
        environment.get_template("report.html").render(
            title=title,
            views=views,
            figures=figures,
            run=run,
            evidence=evidence,
            shown_evidence=shown_claims(evidence.claims) if evidence else (),
            facts=run.governance if run else None,
            decisions_text=decisions_text,
            promises=promises_of(run.record) if run else (),
            seconds=seconds_rows(run.record) if run else (),
            dashes=DASHES,
            headline=_headline(run) if run else (),
            environment=_environment(run) if run else (),
            number=number,
            themes={"light": css_variables(LIGHT), "dark": css_variables(DARK)},
            data=markup(embedded_json(_page_data(views, figures))),
            plotly=markup(plotly_source()),
        )
    )


def _headline(run: RunView) -> tuple[tuple[str, float | None, int], ...]:
    """Return the last value of each metric, and of the loss where there is no metric, with its step."""
    found = dict(run.metrics) or {"mean loss": run.losses}
    return tuple((name, points[-1][1], points[-1][0]) for name, points in found.items() if points)


def _environment(run: RunView) -> list[tuple[str, str]]:
    facts = {"hardware": run.record.hardware, **run.record.environment}
    return [(name, value or "none") for name, value in sorted(facts.items())]


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
