"""How errors reach a person: one message on standard error, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

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


@contextmanager
def _answering() -> Iterator[None]:
    """Exit with 1 where the answer is no, and with 2 where nothing could be read to answer from."""
    try:
        yield
    except RefutedError as error:
        typer.echo(f"No. {error}")
        raise typer.Exit(1) from error
    except BrokenPipeError:
        raise  # `| head` has read enough: click ends quietly
    except (CosmatiError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


class Answering(TyperGroup):
    """A group of commands that ask: 0 is yes."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  (a class that typer keeps private)
        """Run the command."""
        with _answering():
            return super().invoke(ctx)


class Question(TyperCommand):
    """A command that asks, in a group of others."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  (a class that typer keeps private)
        """Run the command."""
        with _answering():
            return super().invoke(ctx)
