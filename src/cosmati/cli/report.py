"""`cosmati report`: one page about one run, from its folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.column_keys import (
    AuthorityPlace,
    AuthorityRoot,
    CredentialFile,
    HolderKey,
    ReadingRights,
    ReleasedKeys,
)
from cosmati.cli.ledger_folder import Quorum, ReplayFile, Witnesses
from cosmati.errors import LedgerError
from cosmati.explorer.price import price_of, runs_below
from cosmati.explorer.report import write_report
from cosmati.explorer.run_view import read_run
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.sealing import ColumnKeys


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder: what --run-folder or RunConfig named.")],
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Runs of the same training without the policy; or a folder of such runs."),
    ] = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    replayed: ReplayFile = None,
    out: Annotated[Path | None, typer.Option(help="The HTML file; report.html in the run folder if left out.")] = None,
    credential: CredentialFile = None,
    released: ReleasedKeys = None,
    holder_key: HolderKey = None,
    authority: AuthorityPlace = "",
    root: AuthorityRoot = "",
) -> None:
    """Write one page about a run that needs nothing from outside: no network, no recipe, no data, no model.

    It shows losses, metrics, plan and guarantees. Of a governed run it also shows the policy, who taught which region
    and when, and who was kept out, all drawn from the ledger once that has verified. A run that was broken off, or
    that is still going, has a page too.

    With --against it shows what the policy cost: pairs of runs with and without it, seed by seed. FOLDER may
    hold further governed runs, too, with the policy of RUN and other seeds.

    What is measured of sensitive classes is sealed, and the page says so. --credential, --keys and --holder-key show
    what they cover, in a page of your own: --out FILE.

    A ledger that doesn't verify, or whose signatures don't hold, is shown as such, nothing is drawn from it, and the
    command exits with 1.

    \b
    Examples:
      cosmati report cosmati-quickstart/governed-run
      cosmati report runs/big-3 --out big-3.html
      cosmati report cosmati-quickstart/governed-run --against cosmati-quickstart/price
    """  # noqa: D301  (\b is click's mark for lines to leave as they are)
    keys = _opened(run, ReadingRights(credential, released, holder_key, authority, root), out)
    view = read_run(run, witnesses=TrustedEvidence.parse(witnesses or (), quorum, replayed), keys=keys)
    price = price_of(view, runs_below(against)) if against else None
    page = write_report(out or run / "report.html", title=view.record.recipe_name, run=view, price=price)
    typer.echo(str(page))
    for text in (*view.warnings, *(view.ledger.problems if view.ledger else ())):
        typer.echo(f"Warning: {text}", err=True)
    if (view.ledger and view.ledger.problems) or (view.trust and view.trust.problems):
        raise typer.Exit(1)


def _opened(run: Path, rights: ReadingRights, out: Path | None) -> ColumnKeys | None:
    """Return the keys of what somebody may read; None where nobody has asked for it."""
    if not rights.any_given:
        return None
    if out is None:
        raise LedgerError("A page with what is sealed isn't for all who see the run folder. Give --out FILE.")
    ledger = VerifiedLedger(run / "ledger")
    return rights.open(ledger.directory, ledger.key.name, ledger.tables)
