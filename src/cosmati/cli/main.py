"""The command `cosmati`."""

from __future__ import annotations

from typing import Annotated

import typer

from cosmati import __version__
from cosmati.cli import (
    data,
    explore,
    export,
    keys,
    ledger,
    policy,
    profile,
    quickstart,
    report,
    store,
    study,
    track,
    train,
)
from cosmati.cli.errors import Teaching

app = typer.Typer(
    cls=Teaching,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train PyTorch models faster by composing methods, govern what they learn, and show the evidence.\n\n"
    "Start with: cosmati quickstart",
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"cosmati {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None: ...


app.command("quickstart")(quickstart.quickstart)
app.command("train")(train.train)
app.command("plan")(train.plan)
app.command("profile")(profile.profile)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("track")(track.track)
app.command("explore")(explore.explore)
app.add_typer(data.app, name="data")
app.add_typer(study.app, name="study")
app.add_typer(store.app, name="store")
app.add_typer(ledger.app, name="ledger")
app.add_typer(policy.app, name="policy")
app.add_typer(keys.app, name="keys")

if __name__ == "__main__":
    app()
