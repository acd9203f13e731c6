"""`cosmati ledger replay` and `spot-check`, which need PyTorch and the run's recipe, as little else there does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cosmati.cli.column_keys import (
    NO_RIGHTS,
    AuthorityPlace,
    AuthorityRoot,
    CredentialFile,
    HolderKey,
    ReadingRights,
    ReleasedKeys,
    opened_ledger,
)
from cosmati.cli.errors import STOPPED
from cosmati.cli.ledger_folder import Folder, Key, Quorum, Witnesses, ledger_of
from cosmati.errors import CosmatiError, LedgerError, RefutedError
from cosmati.ledger.evidence import NOBODY, TrustedEvidence, is_witnessed
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.replay_result import ReplayResult, SegmentResult
from cosmati.ledger.row_blinds import blinds_of_salt, read_blinds, write_blinds
from cosmati.ledger.sealing import KEY_FILE, ColumnKeys, OperatorKeys
from cosmati.ledger.spot_check import choose_segments, result_of
from cosmati.ledger.standing import StandingSteps
from cosmati.progress import ProgressDisplay
from cosmati.storage.atomic import replace_file

if TYPE_CHECKING:
    from cosmati.ledger.difference import LedgerDifference
    from cosmati.recipes.replaying import Without
    from cosmati.train.replay import MakeTrainer, ReplayFound

ReplayRecipe = Annotated[
    str, typer.Option("--recipe", metavar="FILE[:FUNCTION]", help="What the run was made from; it is run.")
]
RecipeSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="As it was given to `cosmati train`.")
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
        help="To compare rows: what `cosmati ledger blinds` has written, or the run's private/rows.salt. RUN's salt if "
        "left out.",
    ),
]
Salt = Annotated[Path | None, typer.Option(metavar="FILE", help="The run's private/rows.salt; RUN's if left out.")]
WithoutRows = Annotated[
    bool,
    typer.Option("--without-rows", help="Without --rows and a salt: take it for an answer that no rows were compared."),
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
    asked = _Asked(ledger_of(folder), recipe, settings or [], checkpoint, rows, anyway, vkey, rights=rights)
    segment = asked.run.segment(*span_of(steps, asked.run.num_steps))
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
    asked = _Asked(ledger_of(folder), recipe, settings or [], checkpoint, rows, anyway, vkey, trusted, rights)
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


def blinds_for(
    folder: Folder,
    steps: Annotated[str, typer.Option(metavar="FIRST:END", help="Which; END is left out.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write them.")],
    salt: Salt = None,
    vkey: Key = None,
) -> None:
    """Write what an auditor needs to compare the rows of some steps, and of no others: their blinds.

    The operator does that once the steps are chosen. Who has the file can try ids and contents against these rows.

    \b
    Example:
      cosmati ledger blinds runs/one --steps 100:120 --out blinds.json
    """  # noqa: D301
    directory = ledger_of(folder)
    run = StandingSteps(VerifiedLedger(directory, vkey))
    found = salt.read_bytes() if salt is not None else _salt_of(directory)
    if found is None:
        raise LedgerError(
            f"There's no private/rows.salt beside {directory}: only the operator has it. Give --salt FILE."
        )
    replace_file(out, write_blinds(run, found, run.segment(*span_of(steps, run.num_steps))))
    typer.echo(str(out))


@dataclass
class _Asked:
    """What both commands are given, opened."""

    directory: Path
    recipe: str
    settings: Sequence[str]
    checkpoint: Path | None
    rows: Path | None
    anyway: bool
    vkey: str | None
    trusted: TrustedEvidence = NOBODY
    rights: ReadingRights = NO_RIGHTS

    def __post_init__(self) -> None:
        self.ledger = opened_ledger(VerifiedLedger(self.directory, self.vkey, self.trusted), self.rights)
        if self.ledger.keys is None:
            self.ledger.keys = _own_keys(self.ledger)
        self.run = StandingSteps(self.ledger)
        known = self.rows.read_bytes() if self.rows else _salt_of(self.directory)
        read = read_blinds if known is not None and known.startswith(b'{"') else blinds_of_salt
        self.blinds = None if known is None else read(self.run, known)
        folder = self.checkpoint or self.directory.parent / "checkpoints"
        self.checkpoints = folder if self.checkpoint or folder.is_dir() else None

    def _make(self) -> MakeTrainer:
        from cosmati.cli.files import load_recipe
        from cosmati.recipes.replaying import trainers_of

        return trainers_of(load_recipe(self.recipe, self.settings), self._without())

    def _without(self) -> Without | None:
        """Return what puts tombstones in place of what the run has forgotten, where its private folder is there."""
        from cosmati.forget.past_run import Gone

        folder, salt = self.directory.parent, _salt_of(self.directory)
        if salt is None or not Gone.is_kept(folder):
            return None
        return lambda asked, source: Gone.after(folder, asked).of(source, salt)

    def replay_one(self, segment: range, *, keep_going: bool) -> ReplayFound:
        from cosmati.train.replay import nearest_checkpoint, replay

        start = nearest_checkpoint(self.run, segment.start, self.checkpoints)
        with _shown(segment.stop - start.step) as told:
            return replay(
                self.run,
                segment,
                self._make(),
                ledger=self.directory,
                start=start,
                blinds=self.blinds,
                keep_going=keep_going,
                anyway=self.anyway,
                told=told,
            )

    def replay_several(self, segments: Sequence[range]) -> list[ReplayFound]:
        from cosmati.train.replay import plan_replays, replay_segments

        planned = plan_replays(self.run, segments, self.checkpoints)
        num_steps = sum(max(one.stop for one in group) - start.step for start, group in planned)
        typer.echo(f"  to run    {num_steps} steps, from {', '.join(str(start.step) for start, _ in planned)}")
        with _shown(num_steps) as told:
            return replay_segments(
                self.run,
                planned,
                self._make(),
                ledger=self.directory,
                blinds=self.blinds,
                anyway=self.anyway,
                told=told,
            )

    def result(self, found: Sequence[ReplayFound], *, seed: str) -> ReplayResult:
        """Return what is written down: segments that weren't reached are in it, too."""
        import torch

        from cosmati.train.facts import describe_environment

        segments = [
            SegmentResult(
                first=one.segment.start,
                end=one.segment.stop,
                start=one.start,
                from_entry_0=one.from_entry_0,
                outcome=one.outcome,
                num_differences=one.num_differences,
                differences=tuple(map(str, one.differences[:_TOLD])),
            )
            for one in found
        ]
        return result_of(
            self.ledger,
            self.run,
            segments,
            seed=seed,
            witnessed=is_witnessed(self.directory, self.ledger.head, self.trusted),
            compares_rows=bool(found) and all(one.compares_rows for one in found),
            skipped=sorted({name for one in found for name in one.skipped}),
            doubts=list(dict.fromkeys(doubt for one in found for doubt in one.doubts)),
            environment=describe_environment(torch.device("cpu")),
        )


def span_of(steps: str, num_steps: int) -> tuple[int, int]:
    """Read `FIRST:END`; either may be left out.

    Raises:
        LedgerError: it isn't of that form.
    """
    first, colon, end = steps.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, end)):
        raise LedgerError(f"--steps {steps!r} is no FIRST:END, such as 100:120, :50 or 100:. Write it so.")
    return int(first or 0), int(end or num_steps)


def _own_keys(ledger: VerifiedLedger) -> ColumnKeys | None:
    """Return the keys of a ledger's sealed columns, where the operator's secret lies beside it."""
    try:
        secret = (ledger.directory.parent / "private" / KEY_FILE).read_bytes()
    except OSError:  # An auditor has no private folder, or isn't let in.
        return None
    return OperatorKeys(secret, ledger.key.name)


def _salt_of(directory: Path) -> bytes | None:
    """Return the salt beside a ledger."""
    try:
        return (directory.parent / "private" / "rows.salt").read_bytes()
    except OSError:  # An auditor has no private folder, or isn't let in.
        return None


@contextmanager
def _shown(num_steps: int) -> Iterator[Callable[[int, Sequence[LedgerDifference]], None]]:
    """Show how far a replay is, and whether it has come out the same so far; Ctrl-C ends it without a trace."""
    done, differs = 0, 0

    def told(step: int, found: Sequence[LedgerDifference]) -> None:
        nonlocal done, differs
        done, differs = done + 1, differs + bool(found)
        display.update(done / num_steps, f"step {step}, {f'{differs} steps differ' if differs else 'equal so far'}")

    try:
        with ProgressDisplay("replaying") as display:
            yield told
    except (CosmatiError, OSError, typer.Exit):
        raise
    except Exception as error:  # of the recipe's own code: it's no answer, and mustn't exit as a no
        raise LedgerError(f"The recipe fails where its steps are taken again: {error!r}.") from error
    except KeyboardInterrupt:
        typer.echo("Stopped before anything could be said.", err=True)
        raise typer.Exit(STOPPED) from None


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
        typer.echo("  but       row commitments weren't compared: that takes the run's salt, or blinds of these steps")
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
    if "equal" not in by_outcome and not without_rows:
        msg = "All that was compared is equal, and row commitments weren't compared: that rows are those which the"
        raise LedgerError(f"{msg} ledger says isn't shown. Give --rows FILE, or ask for less: --without-rows.")
    typer.echo("Yes. Equal in every digest" + ("." if "equal" in by_outcome else " but those of rows."))
