"""`cosmati audit`: one bundle about a run, and its verification by who has nothing else."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.errors import Answering
from cosmati.errors import LedgerError, MissingExtraError, RefutedError
from cosmati.ledger.verify import LEVEL_0

app = typer.Typer(
    cls=Answering,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Hand a run to an auditor as one file, and check such a file. 0 means yes, 1 no, 2 that there is no answer, 3 "
    "that it's consistent in itself and nothing more.",
)
UNPINNED = 3


def _need_extra() -> None:
    try:
        import cosmati.audit.verify  # noqa: F401  (looks for the packages of the extra)
    except ImportError as error:
        raise MissingExtraError(f"Bundles need {error.name}. Install it: pip install 'cosmati[audit]'") from error


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write; RUN.audit.zip beside it if left out.")
    ] = None,
    about: Annotated[
        Path | None, typer.Option(help="What only the provider can say: a file begun with `cosmati audit about`.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A checkpoint of the run, or its file of weights; the newest if left out.")
    ] = None,
    no_weights: Annotated[bool, typer.Option("--no-weights", help="Leave the weights out.")] = False,
    replays: Annotated[
        list[Path] | None, typer.Option("--replay", metavar="FILE", help="A result of `ledger spot-check`, to enclose.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The operator's key; the run's own if left out.")] = None,
    credential: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Whose holder may read what is sealed; with --keys.")
    ] = None,
    released: Annotated[
        Path | None, typer.Option("--keys", metavar="FILE", help="What `cosmati ledger release` wrote for them.")
    ] = None,
) -> None:
    """Write one file about a run: ledger, who vouched, weights, claims, and documents in others' forms.

    In it: the signed ledger and the metadata that bears it out; weights signed as OpenSSF model-signing does it;
    in-toto statements; a CycloneDX bill of materials; Croissant of each signed source; the public summary of training
    content that the EU AI Act asks for. Private keys, salts and rows never are. Columns of sensitive classes are sealed
    in it; with --credential and --keys its holder, and nobody else, can read what that covers.

    \b
    Examples:
      cosmati audit export cosmati-quickstart/governed-run
      cosmati audit export RUN --about about.yaml --out for-the-auditor.zip
    """  # noqa: D301
    _need_extra()
    from cosmati.audit.about import About, read_about
    from cosmati.audit.export import export_bundle
    from cosmati.audit.weights import named_weights

    if (credential is None) != (released is None):
        raise LedgerError("What is sealed is enclosed with two files: --credential and --keys. Give both, or none.")
    rights = None if credential is None or released is None else (credential, released)
    ledger = run / "ledger"
    found = None if no_weights else named_weights(weights or run, ledger)
    target = out or run.resolve().parent / f"{run.resolve().name}.audit.zip"
    words = read_about(about) if about else About()
    operator = key or run / "private" / "operator.key"
    export_bundle(ledger, target, key=operator, weights=found, replays=replays or (), about=words, rights=rights)
    missing = [name for name, value in words.model_dump().items() if not value and name != "sources"]
    typer.echo(f"Wrote {target}, {target.stat().st_size:,} bytes")
    if missing:
        typer.echo(f"The summary of training content lacks what only its provider knows: {', '.join(missing)}.")
        typer.echo("Begin a file for that with `cosmati audit about > about.yaml`, and export again with --about.")
    typer.echo(f"Its reader runs: cosmati audit verify {target.name} --trust trust.yaml")


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file that `cosmati audit export` wrote.")],
    trust: Annotated[
        Path | None,
        typer.Option(help="Keys and fingerprints that you got elsewhere: begun with `cosmati audit trust`."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Keep its files, in this new folder.")] = None,
    holder_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your private key, which the enclosed credential names.")
    ] = None,
) -> None:
    """Check a bundle with nothing but itself and what you trust: signatures, digests, ledger, weights, each figure.

    Exits with 0 where all of it holds under keys and roots that you named, with 3 where it's only consistent in itself,
    and with 1 where something doesn't hold.

    \b
    Examples:
      cosmati audit trust > trust.yaml
      cosmati audit verify governed-run.audit.zip --trust trust.yaml
    """  # noqa: D301
    _need_extra()
    from cosmati.audit.trust import read_trust
    from cosmati.audit.verify import verify_bundle

    known = read_trust(trust) if trust else None
    if out is not None:
        out.mkdir(parents=True)  # an existing one is an error: its files may be somebody's
    with tempfile.TemporaryDirectory() as place:
        try:
            report = verify_bundle(bundle, out or Path(place), known, holder_key)
        except RefutedError as error:
            msg = f"{bundle} doesn't verify: {error}"
            raise RefutedError(msg) from error
    typer.echo(f"{'Consistent in itself' if report.unpinned else 'Verified'}: {bundle}")
    for what, words in report.lines:
        typer.echo(f"  {what:<10} {words}")
    typer.echo(f"  evidence   {LEVEL_0 if report.unpinned else report.evidence_level}")
    if report.unpinned:
        for words in report.unpinned:
            typer.echo(f"  not pinned {words}")
        typer.echo(
            "Get these from the parties themselves, put them into a file (`cosmati audit trust`), and ask again."
        )
        raise typer.Exit(UNPINNED)


@app.command()
def trust() -> None:
    """Print a blank file of what an auditor trusts."""
    from cosmati.audit.trust import BLANK

    typer.echo(BLANK, nl=False)


@app.command()
def about() -> None:
    """Print a blank file of what only a model's provider can say."""
    from cosmati.audit.about import BLANK

    typer.echo(BLANK, nl=False)
