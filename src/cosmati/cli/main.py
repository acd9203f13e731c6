"""The command `cosmati`."""

from __future__ import annotations

import typer

from cosmati.cli import data, explore, ledger, policy, profile, quickstart, report, store, study, track, train
from cosmati.cli.errors import Teaching

app = typer.Typer(
    cls=Teaching,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train PyTorch models faster by composing methods, govern what they learn, and show the evidence.\n\n"
    "Start with: cosmati quickstart",
)
app.command("quickstart")(quickstart.quickstart)
app.command("train")(train.train)
app.command("plan")(train.plan)
app.command("profile")(profile.profile)
app.command("report")(report.report)
app.command("track")(track.track)
app.command("explore")(explore.explore)
app.add_typer(data.app, name="data")
app.add_typer(study.app, name="study")
app.add_typer(store.app, name="store")
app.add_typer(ledger.app, name="ledger")
app.add_typer(policy.app, name="policy")

if __name__ == "__main__":
    app()
