"""`cosmati report`: one page about one run, from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.explorer.report import write_report
from cosmati.explorer.run_view import read_run


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder: what --run-folder or RunConfig named.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; report.html in the run folder if left out.")] = None,
) -> None:
    """Write one page about a run that needs nothing from outside: no network, no recipe, no data, no model.

    It shows losses, metrics, plan and guarantees. Of a governed run it also shows the policy, who taught which region
    and when, and who was kept out, all drawn from the ledger once that has verified. A run that was broken off, or
    that is still going, has a page too.

    A ledger that doesn't verify is shown as such, nothing is drawn from it, and the command exits with 1.

    \b
    Examples:
      cosmati report cosmati-quickstart/governed-run
      cosmati report runs/big-3 --out big-3.html
    """  # noqa: D301  (\b is click's mark for lines to leave as they are)
    view = read_run(run)
    page = write_report(out or run / "report.html", title=view.record.recipe_name, run=view)
    typer.echo(str(page))
    for text in (*view.warnings, *(view.ledger.problems if view.ledger else ())):
        typer.echo(f"Warning: {text}", err=True)
    if view.ledger and view.ledger.problems:
        raise typer.Exit(1)
