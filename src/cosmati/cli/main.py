"""The command `cosmati`."""

from __future__ import annotations

from typing import Annotated

import typer

from cosmati import __version__
from cosmati.cli.commands import Commands

app = typer.Typer(
    cls=Commands,
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


if __name__ == "__main__":
    app()
