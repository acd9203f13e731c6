"""How errors reach a person: one message on standard error, and an exit code."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from cosmati.errors import CosmatiError, RefutedError

STOPPED = 130
"""Exit code after Ctrl-C, as shells have it."""


class Teaching(TyperGroup):
    """A command group that prints Cosmati's own errors as one message, without a traceback, and exits with 1."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  (a class that typer keeps private)
        """Run the command."""
        try:
            return super().invoke(ctx)
        except CosmatiError as error:
            typer.echo(f"Error: {error}", err=True)
            for note in getattr(error, "__notes__", ()):
                if "\n" not in note:  # where it was; a traceback isn't for here
                    typer.echo(note, err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            typer.echo("Stopped. The same command goes on from what is on disk.", err=True)
            raise typer.Exit(STOPPED) from error


class Answering(TyperGroup):
    """A group of commands that ask: 0 is yes, 1 is no, and 2 that nothing could be read to answer from."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  (a class that typer keeps private)
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RefutedError as error:
            typer.echo(f"No. {error}")
            raise typer.Exit(1) from error
        except BrokenPipeError:
            raise  # `| head` has read enough: click ends quietly
        except (CosmatiError, OSError) as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error
