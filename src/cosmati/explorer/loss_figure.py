"""The loss of a run: in training, on held-out rows, and on each class of these."""

from __future__ import annotations

from typing import Any

from cosmati.explorer.class_marks import ALL_ROWS, class_marks, class_of_metric
from cosmati.explorer.figures import (
    MAX_LINE_POINTS,
    Figure,
    averaged,
    axis_title,
    base_layout,
    csv_text,
    plotly_text,
)
from cosmati.explorer.palette import Palette
from cosmati.explorer.run_view import Points, RunView

LOSS = ("loss", f"loss/{ALL_ROWS}")
"""Names of metrics that are the training loss on held-out rows."""


def is_in_loss_figure(run: RunView, name: str) -> bool:
    """Say whether a metric is drawn beside the training loss: it's the loss of held-out rows, or of a class of them."""
    return name in LOSS or (name.startswith("loss/") and class_of_metric(run, name) is not None)


def has_loss_curve(run: RunView) -> bool:
    """Say whether there is a loss to draw: two points of it, in training or on held-out rows."""
    return any(len(points) > 1 for points in (run.losses, *(run.metrics.get(name, ()) for name in LOSS)))


def loss_figure(run: RunView, palette: Palette, twin: RunView | None = None, *, has_csv: bool = True) -> Figure:
    """Draw the loss over the steps; its CSV has all points.

    Args:
        run: whose loss it is.
        palette: of the page.
        twin: the same training without the policy, whose loss on held-out rows is drawn, too.
        has_csv: write the CSV.
    """
    marks = class_marks(run)
    series: list[tuple[str, Points, dict[str, Any], str]] = [
        ("training", run.losses, {"color": palette.muted, "width": 1.2}, "lines"),
    ]
    for name, points in run.metrics.items():
        whose = class_of_metric(run, name)
        if name in LOSS:
            label = "held out" if not marks else "held out, all classes"
            series.append((label, points, {"color": palette.ink, "width": 3}, "lines+markers"))
        elif whose is not None and is_in_loss_figure(run, name):
            series.append((f"held out, {whose}", points, marks[whose].line(palette, 1.8), "lines+markers"))
    for name in LOSS if twin else ():
        if twin and name in twin.metrics:
            line = {"color": palette.ink, "width": 1.8, "dash": "dot"}
            series.append(("held out, without the policy", twin.metrics[name], line, "lines+markers"))
    traces = [_trace(*one) for one in series if one[1]]
    if twin and traces[-1]["name"].endswith("without the policy"):
        traces[-1]["marker"] |= {"symbol": "circle-open"}
    layout = base_layout(palette, height=420)
    layout["xaxis"] |= {"title": axis_title("steps done"), "rangemode": "tozero"}
    layout["yaxis"] |= {"title": axis_title("mean loss"), "exponentformat": "power"}
    if (frame := _frame(run)) is not None:
        layout["yaxis"] |= {"range": frame}
    layout["showlegend"] = len(traces) > 1
    layout["margin"] |= {"b": 56 + (22 * -(-len(traces) // 3) if len(traces) > 1 else 0)}
    rows = [[label, step, value] for label, points, _, _ in series for step, value in points]
    parts = ", on held-out rows" if len(traces) > 1 else ""
    parts += " and by class" if any(class_of_metric(run, name) for name in run.metrics) else ""
    return Figure(
        {"data": traces, "layout": layout},
        f"mean loss over the steps{parts}",
        csv_text(["rows", "step", "mean loss"], rows) if has_csv else "",
    )


def own_metrics(run: RunView) -> dict[str, Points]:
    """Return the metrics that are of no single class, the loss on held-out rows by a name that says so."""
    return {
        "loss on held-out rows" if name in LOSS else name: points
        for name, points in run.metrics.items()
        if class_of_metric(run, name) is None
    }


def _frame(run: RunView) -> list[float] | None:
    """Return a range of losses without those of the first training steps; None where these aren't far above the rest.

    Held-out rows are measured later, and an untrained model's loss would press all curves together.
    """
    held_out = [(s, v) for name, points in run.metrics.items() if is_in_loss_figure(run, name) for s, v in points]
    measured = [value for _, value in held_out if value is not None]
    if not measured:
        return None
    first = min(step for step, _ in held_out)
    rest = [value for step, value in run.losses if value is not None and step >= first]
    high, low = max(measured + rest), min(measured + rest)
    highest = max((value for _, value in run.losses if value is not None), default=high)
    pad = 0.08 * (high - low)
    return [low - pad, high + pad] if highest > high + 2 * pad > high else None


def _trace(label: str, points: Points, line: dict[str, Any], mode: str) -> dict[str, Any]:
    x, y = averaged([(step, value) for step, value in points if value is not None], MAX_LINE_POINTS)
    trace = {"type": "scatter", "mode": mode, "name": plotly_text(label), "x": x, "y": y, "line": line}
    return trace | {"marker": {"size": 6}, "hovertemplate": "step %{x}: %{y:.4g}<extra>%{fullData.name}</extra>"}
