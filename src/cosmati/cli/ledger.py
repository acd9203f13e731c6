"""`cosmati ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.ledger.query import (
    Contribution,
    classes_of_region,
    contributions,
    direct_write_exclusion,
    regions_of_class,
)
from cosmati.ledger.verify import verify_ledger

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Verify a run's ledger, and ask it what it knows.")
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A run folder, or its ledger folder.")]
Key = Annotated[str | None, typer.Option("--vkey", help="The operator's verifier key, from a source you trust.")]


def _ledger(folder: Path) -> Path:
    return folder / "ledger" if (folder / "ledger").is_dir() else folder


@app.command()
def verify(folder: Folder, vkey: Key = None) -> None:
    """Check everything: signature, hashes, details, and which entry may follow which.

    Exits with 1 and says what is wrong if anything doesn't verify.

    \b
    Example:
      cosmati ledger verify cosmati-quickstart/governed-run
    """  # noqa: D301
    report = verify_ledger(_ledger(folder), vkey=vkey)
    typer.echo(f"Verified: {report.size} entries, {report.num_steps} steps, {report.num_attempts} attempt(s)")
    typer.echo(f"  origin    {report.origin}")
    typer.echo(f"  key       {report.key_id}" + ("" if vkey else "  (the ledger's own: pass --vkey to pin it)"))
    typer.echo(f"  root      {report.root}")
    typer.echo(f"  evidence  {report.evidence_level}")
    typer.echo(f"  the run {'has ended' if report.has_ended else 'has not ended'}")
    if report.diverged_steps:
        typer.echo(f"  steps that came out differently when run again: {list(report.diverged_steps)}")


@app.command()
def show(folder: Folder, vkey: Key = None) -> None:
    """Show how many rows of each class reached each region.

    \b
    Example:
      cosmati ledger show cosmati-quickstart/governed-run
    """  # noqa: D301
    table = contributions(_ledger(folder), vkey=vkey)
    width = max(len(name) for name in table.classes)
    typer.echo(" " * width + "".join(f"{region:>14}" for region in table.regions))
    rows = {(c.class_name, c.region): c.num_rows for c in table.cells}
    for name in table.classes:
        counts = "".join(f"{rows[name, region] or '·':>14}" for region in table.regions)
        typer.echo(f"{name:<{width}}{counts}")
    typer.echo(f"Rows over {table.num_steps} steps. {table.evidence_level}.")


@app.command()
def query(
    folder: Folder,
    class_name: Annotated[str | None, typer.Option("--class", help="Which regions did this class reach?")] = None,
    region: Annotated[str | None, typer.Option("--region", help="Which classes reached this region?")] = None,
    vkey: Key = None,
) -> None:
    """Ask which class taught which region. With both, state that the class wrote nothing there, or that it did.

    \b
    Examples:
      cosmati ledger query RUN --class open/psf
      cosmati ledger query RUN --region embedding
      cosmati ledger query RUN --class open/psf --region embedding
    """  # noqa: D301
    ledger = _ledger(folder)
    if class_name and region:
        s = direct_write_exclusion(ledger, class_name, region, vkey=vkey)
        typer.echo(f"No logged step gave rows tagged {s.class_name} any weight in {s.region}.")
        typer.echo(f"  scanned   {s.num_steps_scanned} steps, {s.num_class_microbatches} microbatches of the class")
        typer.echo(f"  root      {s.root}")
        typer.echo(f"  evidence  {s.evidence_level}")
        typer.echo("This is about direct writes. It doesn't say that the class had no influence on the region.")
        return
    if class_name:
        cells: tuple[Contribution, ...] = regions_of_class(ledger, class_name, vkey=vkey)
    elif region:
        cells = classes_of_region(ledger, region, vkey=vkey)
    else:
        cells = tuple(c for c in contributions(ledger, vkey=vkey).cells if c.num_microbatches)
    for cell in cells:
        share = "–" if cell.norm_share is None else f"{cell.norm_share:.1%}"
        typer.echo(
            f"{cell.class_name:<22}{cell.region:<16}{cell.num_rows:>8} rows in {cell.num_steps:>6} steps, "
            f"{share:>6} of the region's gradient norms"
        )
    if not cells:
        typer.echo("None.")
