"""Write `docs/cli.md`, the reference of all commands, from the commands themselves: `python tools/write_cli.py`.

With `--check` nothing is written, and a page that isn't theirs is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from cosmati.cli.commands import load_command
from cosmati.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """# Commands

<!-- Written by tools/write_cli.py from the commands: change their help, and run it. -->

`cosmati COMMAND --help` says the same in the terminal. What goes wrong is one message on standard error, which begins
with `Error:`, and exit status 1. Commands that ask (`cosmati ledger`, `cosmati policy explain`) exit with 0 for yes, 1
for no, and 2 where nothing could be read to answer from. A run that Ctrl-C has stopped exits with 130.

`cosmati --install-completion` lets your shell (bash, zsh, fish, PowerShell) complete commands, options and paths, from
the next one on.
"""
_VERBATIM = "\b\n"
"""click's mark, in a help text, for a paragraph whose lines stay as they are."""


def commands_of(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401  (classes that typer keeps private)
    """Yield a group's commands, each with its context, those of a group within it after it."""
    for name, listed in getattr(command, "commands", {}).items():
        one = load_command(name) if context.parent is None else listed
        inner = one.context_class(one, info_name=name, parent=context)
        yield one, inner
        yield from commands_of(one, inner)


def section(command: Any, context: Any) -> str:  # noqa: ANN401
    """Return what the page says of one command."""
    title = context.command_path
    depth = "##" if title.count(" ") == 1 else "###"
    parts = [f"{depth} {title}", *paragraphs(command.help or "")]
    if not getattr(command, "commands", None):
        usage = " ".join([title, *(piece.strip("{}") for piece in command.collect_usage_pieces(context) if piece)])
        rows = [one for one in map(lambda p: p.get_help_record(context), command.params) if one]  # noqa: C417
        table = [f"| `{in_table(name)}` | {escaped(in_table(text))} |" for name, text in rows]
        parts[1:1] = [f"```text\n{usage}\n```"]
        parts += ["\n".join(["| | |", "|---|---|", *table])] if table else []
    return "\n\n".join(parts)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text, those with lines of their own as blocks of code."""
    for paragraph in text.split("\n\n"):
        if not paragraph.startswith(_VERBATIM):
            yield escaped(paragraph)
            continue
        first, _, rest = paragraph.removeprefix(_VERBATIM).partition("\n")
        is_titled = first.endswith(":")
        lines = [line.removeprefix("  ") for line in rest.splitlines()] if is_titled else [first, *rest.splitlines()]
        yield "\n".join([*([first, ""] if is_titled else []), "```text", *lines, "```"])


def in_table(text: str) -> str:
    """Return a text on one line that can stand in a table."""
    return re.sub(r"\s+", " ", text).replace(" <str>", "").replace("|", "\\|").strip()


def escaped(text: str) -> str:
    """Return a text in which no angle bracket begins a tag."""
    return text.replace("<", "&lt;").replace(">", "&gt;") if "`" not in text else text


def page() -> str:
    """Return the page."""
    main = typer.main.get_command(app)
    context: Any = main.context_class(main, info_name="cosmati")
    return "\n\n".join([HEAD.rstrip(), *(section(*one) for one in commands_of(main, context))]) + "\n"


def main() -> None:
    """Write the page, or look whether it is right."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
        return
    if not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE} isn't what the commands say. Run: python tools/write_cli.py")
    print(f"{PAGE.name} says what the commands do.")


if __name__ == "__main__":
    main()
