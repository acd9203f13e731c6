"""Write studies and a run as one HTML file that needs nothing from outside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cosmati.errors import RunError
from cosmati.explorer.about_view import licence_rows, plain_commands, sample_pairs, source_classes, split_exclusions
from cosmati.explorer.class_marks import class_marks, classes_with_data
from cosmati.explorer.deletion_drawing import DeletionDrawing, deletion_drawing
from cosmati.explorer.deletion_view import DeletionView
from cosmati.explorer.evidence import Evidence, shown_claims
from cosmati.explorer.figures import Figure, tradeoff_figure
from cosmati.explorer.loss_figure import own_metrics
from cosmati.explorer.opening import opening_sentences
from cosmati.explorer.palette import PAGE
from cosmati.explorer.price import Price
from cosmati.explorer.rendering import embedded_json, plotly_source, safe_markup, template_environment
from cosmati.explorer.run_figures import grid_width, run_figures, weighted_classes
from cosmati.explorer.run_view import RunView
from cosmati.explorer.trust_drawing import TrustDrawing, trust_drawing
from cosmati.explorer.views import (
    StudyView,
    decisions_text,
    live_data,
    promises_of,
    seconds_rows,
    study_figures,
    study_view,
)
from cosmati.records.study import StudyRecord


def write_report(
    path: str | Path,
    *,
    title: str,
    studies: Sequence[StudyRecord] = (),
    run: RunView | None = None,
    price: Price | None = None,
    evidence: Evidence | None = None,
    deletion: DeletionView | None = None,
) -> Path:
    """Write the report page and return its path.

    The page holds its own styles, script, Plotly and data: it makes no request. All text is escaped.

    Args:
        path: Path of the file; its folder is made if it isn't there.
        title: Title of the page.
        studies: Studies, one section each.
        run: The run whose training, plan, guarantees, policy and ledger are shown.
        price: What the run's policy cost.
        evidence: What was measured before and committed, to stand beside the studies.
        deletion: What was taken out of the run, by the run that goes on without it.

    Raises:
        MissingExtraError: Jinja2 or Plotly isn't installed. RunError: the file can't be written.
    """
    page = render_report(title=title, studies=studies, run=run, price=price, evidence=evidence, deletion=deletion)
    path = Path(path).expanduser()
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
    price: Price | None = None,
    evidence: Evidence | None = None,
    deletion: DeletionView | None = None,
) -> str:
    """Return the report page as text; see `write_report`."""
    templates = template_environment()
    views = tuple(study_view(study, f"study-{index}") for index, study in enumerate(studies, start=1))
    figures = {name: figure for view in views for name, figure in study_figures(view).items()}
    if run is not None:
        figures |= run_figures(run, PAGE, twin=price.twin if price else None)
    if evidence is not None:
        figures |= {f"evidence-{task}": tradeoff_figure(study, PAGE) for task, study in evidence.studies}
    return templates.get_template("report.html").render(
        title=title,
        opening=opening_sentences(studies, run, price),
        views=views,
        figures=figures,
        evidence=evidence,
        shown_evidence=shown_claims(evidence.claims) if evidence else (),
        data=safe_markup(embedded_json(page_data(views, figures))),
        plotly=safe_markup(plotly_source()),
        deletion=deletion,
        deletion_pictures=_deletion_pictures(deletion),
        **run_context(run, price),
    )


def run_context(run: RunView | None, price: Price | None = None) -> dict[str, Any]:
    """Return what the templates about a run are given."""
    about = run.about if run else None
    return {
        "run": run,
        "price": price,
        "marks": class_marks(run),
        "trust": run.trust if run else None,
        "chains": _chains(run) if run else (),
        "with_data": classes_with_data(run) if run else (),
        "weighted_classes": weighted_classes,
        "grid_width_of": grid_width,
        "excluded": split_exclusions(run) if run else ((), ()),
        "sources": source_classes(run.governance.sources) if run and run.governance else (),
        "samples": sample_pairs(run, price.twin if price else None) if run else (),
        "commands": plain_commands(about.commands) if about else (),
        "decided": licence_rows(about.packages) if about else (),
        "facts": run.governance if run else None,
        "decisions_text": decisions_text,
        "promises": promises_of(run.record) if run else (),
        "seconds": seconds_rows(run.record) if run else (),
        "headline": _headline(run) if run else (),
        "environment": _environment(run) if run else (),
    }


def _chains(run: RunView) -> tuple[tuple[str, TrustDrawing], ...]:
    """Return the picture of who vouched, who decided and what was trained, for wide and for narrow screens."""
    if run.trust is None or run.governance is None or run.trust.problems:
        return ()
    draw = partial(trust_drawing, run.trust, run.governance, class_marks(run))
    return ("wide", draw()), ("narrow", draw(is_narrow=True))


def _deletion_pictures(deletion: DeletionView | None) -> tuple[tuple[str, DeletionDrawing], ...]:
    """Return the picture of a replay, for wide and for narrow screens."""
    if deletion is None or deletion.problem or deletion.method != "replay":
        return ()
    return ("wide", deletion_drawing(deletion)), ("narrow", deletion_drawing(deletion, is_narrow=True))


def _headline(run: RunView) -> tuple[tuple[str, float | None, int], ...]:
    """Return the last value of each metric, and of the loss where there is no metric, with its step.

    Metrics of single classes are left to the figures.
    """
    found = own_metrics(run) or {"mean loss": run.losses}
    return tuple((name, points[-1][1], points[-1][0]) for name, points in found.items() if points)


def _environment(run: RunView) -> list[tuple[str, str]]:
    facts = {"hardware": run.record.hardware, **run.record.environment}
    return [(name, value or "none") for name, value in sorted(facts.items())]


def page_data(views: Sequence[StudyView], figures: dict[str, Figure]) -> dict[str, Any]:
    """Return what a page's script needs: figures by name, and the positions of the studies' quality lines."""
    shown = {name: {"plot": one.plot, "csv": one.csv} for name, one in figures.items()}
    return {"figures": shown, "studies": {view.anchor: live_data(view) for view in views}}
