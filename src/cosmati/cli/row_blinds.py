"""`cosmati ledger blinds`: what an auditor needs to compare the rows of some steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.ledger_folder import Folder, Key, ledger_of
from cosmati.cli.replay_asked import AskedReplay, RecipeSettings, parse_steps, salt_of
from cosmati.errors import LedgerError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.row_blinds import write_blinds
from cosmati.ledger.standing import StandingSteps
from cosmati.storage.atomic import replace_file

Salt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The private/rows.salt of a run whose rows have no keys; RUN's if left out."),
]


def blinds_for(
    folder: Folder,
    steps: Annotated[str, typer.Option(metavar="FIRST:END", help="Which; END is left out.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write them.")],
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="FILE[:FUNCTION]", help="What the run was made from; it is run.")
    ] = "",
    settings: RecipeSettings = None,
    salt: Salt = None,
    vkey: Key = None,
) -> None:
    """Write what an auditor needs to compare the rows of some steps, and of no others: their blinds.

    The operator does that once the steps are chosen. Who has the file can try ids and contents against these rows. A
    blind follows from its row's own key, so the steps are replayed with the recipe to learn which rows they had. Rows
    that were forgotten have none. Of steps since a deletion, it says too what tombstones stand for.

    \b
    Example:
      cosmati ledger blinds runs/one --steps 100:120 --recipe digits.py --out blinds.json
    """  # noqa: D301
    directory = ledger_of(folder)
    run = StandingSteps(VerifiedLedger(directory, vkey))
    segment = run.segment(*parse_steps(steps, run.num_steps))
    if recipe:
        asked = AskedReplay(directory, recipe, settings or [], None, salt, anyway=False, vkey=vkey)
        data = asked.recorded(segment)
    else:
        found = salt.read_bytes() if salt is not None else salt_of(directory)
        has_keys = "rows_keys" in dict(run.ledger.run.commitments)
        if found is None or has_keys or any(one.forgotten for one in run.spans if one.end > segment.start):
            raise LedgerError(
                "Which rows these steps had, or what tombstones stand for in them, a replay tells. Give the run's "
                f"recipe, --recipe FILE[:FUNCTION], and RUN with its private folder beside {directory}."
            )
        data = write_blinds(run, found, segment)
    replace_file(out, data)
    typer.echo(str(out))
