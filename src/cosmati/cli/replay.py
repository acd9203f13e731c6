"""`cosmati ledger replay` and `spot-check`, which need PyTorch and the run's recipe, as little else there does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cosmati.cli.column_keys import (
    AuthorityPlace,
    AuthorityRoot,
    CredentialFile,
    HolderKey,
    ReadingRights,
    ReleasedKeys,
)
from cosmati.cli.errors import STOPPED
from cosmati.cli.ledger_folder import Folder, Key, Quorum, Witnesses, ledger_of
from cosmati.cli.replay_asked import AskedReplay, RecipeSettings, parse_steps
from cosmati.errors import LedgerError, RefutedError
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.replay_result import BUT_FORGOTTEN, BUT_ROWS, ReplayResult
from cosmati.ledger.spot_check import choose_segments
from cosmati.storage.atomic import replace_file

if TYPE_CHECKING:
    from cosmati.train.replay import ReplayFound

ReplayRecipe = Annotated[
    str, typer.Option("--recipe", metavar="FILE[:FUNCTION]", help="What the run was made from; it is run.")
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", metavar="FOLDER", help="Go on from this one, or one of those in it; RUN's if left out."
    ),
]
BlindsFile = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        metavar="FILE",
        help="To compare rows: what `cosmati ledger blinds` has written, or the run's private/rows.keys (of an older "
        "run rows.salt). RUN's if left out.",
    ),
]
WithoutRows = Annotated[
    bool,
    typer.Option("--without-rows", help="Without --rows and keys: take it for an answer that no rows were compared."),
]
Anyway = Annotated[
    bool, typer.Option("--anyway", help="Also where a difference would say nothing: on another processor, say.")
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write what was found, as JSON.")]
_TOLD = 8


def replay_steps(  # noqa: PLR0913, PLR0917  (a command's options)
    folder: Folder,
    recipe: ReplayRecipe,
    steps: Annotated[str, typer.Option(metavar="FIRST:END", help="Which; `:` is all. END is left out.")] = ":",
    settings: RecipeSettings = None,
    checkpoint: CheckpointFolder = None,
    rows: BlindsFile = None,
    without_rows: WithoutRows = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Compare all steps, and don't stop at the first that differs.")
    ] = False,
    anyway: Anyway = False,
    out: Out = None,
    vkey: Key = None,
    credential: CredentialFile = None,
    released: ReleasedKeys = None,
    holder_key: HolderKey = None,
    authority: AuthorityPlace = "",
    root: AuthorityRoot = "",
) -> None:
    """Run steps again from the nearest checkpoint, and compare every digest with the ledger's.

    What is sealed is compared where RUN has its private/columns.key, or the keys were released to you.

    RUN is read and never written; it may still be training. 0: all that the ledger says of these steps came out
    the same. 1: it didn't, and the first difference is named. 2: there's no answer.

    \b
    Examples:
      cosmati ledger replay runs/one --recipe digits.py --steps 100:120
      cosmati ledger replay ledger-copy --recipe digits.py --steps :50 --without-rows
    """  # noqa: D301
    rights = ReadingRights(credential, released, holder_key, authority, root)
    asked = AskedReplay(ledger_of(folder), recipe, settings or [], checkpoint, rows, anyway, vkey, rights=rights)
    segment = asked.run.segment(*parse_steps(steps, asked.run.num_steps))
    found = asked.replay_one(segment, keep_going=keep_going)
    result = asked.result([found], seed="")
    _write(out, result)
    _tell(found)
    typer.echo(f"  evidence  {result.level}")
    _answer([found], without_rows=without_rows)


def spot_check(  # noqa: PLR0913, PLR0917  (a command's options)
    folder: Folder,
    recipe: ReplayRecipe,
    auditor_seed: Annotated[str, typer.Option(help="The auditor's own, which the operator couldn't know.")],
    segments: Annotated[int, typer.Option(help="How many.")] = 5,
    length: Annotated[int, typer.Option(help="Steps in each.")] = 4,
    settings: RecipeSettings = None,
    checkpoint: CheckpointFolder = None,
    rows: BlindsFile = None,
    without_rows: WithoutRows = False,
    anyway: Anyway = False,
    out: Out = None,
    vkey: Key = None,
    witnesses: Witnesses = None,
    quorum: Quorum = 0,
    credential: CredentialFile = None,
    released: ReleasedKeys = None,
    holder_key: HolderKey = None,
    authority: AuthorityPlace = "",
    root: AuthorityRoot = "",
) -> None:
    """Replay segments that neither side has chosen: they follow from the signed tree head and the auditor's seed.

    The choice is printed before anything runs. The result file states head, seed, segments, outcomes and level.

    \b
    Example:
      cosmati ledger spot-check runs/one --recipe digits.py --auditor-seed "$SEED" --out found.json
    """  # noqa: D301
    trusted = TrustedEvidence.parse(witnesses or (), quorum)
    rights = ReadingRights(credential, released, holder_key, authority, root)
    asked = AskedReplay(ledger_of(folder), recipe, settings or [], checkpoint, rows, anyway, vkey, trusted, rights)
    head, num_steps = asked.ledger.head, asked.run.num_steps
    chosen = choose_segments(head, auditor_seed, num_steps=num_steps, number=segments, length=length)
    typer.echo(f"Chosen by the head of {head.size} entries, root {head.root.hex()}, and the auditor's seed:")
    typer.echo(f"  steps     {', '.join(f'{one.start}:{one.stop}' for one in chosen)} of {num_steps}")
    found = asked.replay_several(chosen)
    result = asked.result(found, seed=auditor_seed)
    _write(out, result)
    for one in found:
        _tell(one)
    typer.echo(f"  evidence  {result.level}")
    _answer(found, without_rows=without_rows)


def _write(out: Path | None, result: ReplayResult) -> None:
    if out is not None:
        replace_file(out, result.to_bytes())


def _tell(found: ReplayFound) -> None:
    """Say what was compared, and what wasn't."""
    segment = found.segment
    begun = "entry 0, with the recipe's own model" if found.from_entry_0 else f"the checkpoint of step {found.start}"
    typer.echo(f"Steps {segment.start}:{segment.stop}: {found.outcome}")
    typer.echo(f"  from      {begun}; {found.num_steps} steps and {found.num_roots} signed states compared")
    if not found.compares_rows:
        typer.echo("  but       row commitments weren't compared: that takes the run's keys, or blinds of these steps")
    if found.forgotten_by:
        by, steps = " or ".join(map(str, found.forgotten_by)), [one for one in segment if one in found.forgotten]
        typer.echo(f"  but       {len(steps)} steps from {steps[0]} on have rows forgotten by certificate {by}:")
        typer.echo("            nobody can compare the commitments of these microbatches; all else was compared")
    if found.skipped:
        typer.echo(f"  but       of the details, {', '.join(found.skipped)} weren't compared")
    for doubt in found.doubts:
        typer.echo(f"  but       {doubt}")
    for one in found.differences[:_TOLD]:
        typer.echo(f"  differs   {one}")
    if found.num_differences > _TOLD:
        typer.echo(f"            and {found.num_differences - _TOLD} more")


def _answer(found: Sequence[ReplayFound], *, without_rows: bool) -> None:
    """Exit as the other questions to a ledger do.

    Raises:
        RefutedError: it came out otherwise. LedgerError: nobody can say.
    """
    by_outcome = {one.outcome: one for one in reversed(found)}
    if one := by_outcome.get("different"):
        raise RefutedError(f"The first that differs is {one.differences[0]}.")
    if one := by_outcome.get("not comparable"):
        msg = f"It came out otherwise ({one.differences[0]}), which says nothing here: {'; '.join(one.doubts)}."
        raise LedgerError(f"{msg} Replay it where it was trained.")
    if "interrupted" in by_outcome:
        typer.echo("Stopped. What was compared until then is equal.", err=True)
        raise typer.Exit(STOPPED)
    if BUT_ROWS in by_outcome and not without_rows:
        msg = "All that was compared is equal, and row commitments weren't compared: that rows are those which the"
        raise LedgerError(f"{msg} ledger says isn't shown. Give --rows FILE, or ask for less: --without-rows.")
    if BUT_ROWS in by_outcome:
        typer.echo("Yes. Equal in every digest but those of rows.")
    else:
        but = " but those of forgotten rows" if BUT_FORGOTTEN in by_outcome else ""
        typer.echo(f"Yes. Equal in every digest{but}.")
