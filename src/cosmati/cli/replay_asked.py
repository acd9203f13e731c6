"""What `cosmati ledger replay`, `spot-check` and `blinds` are given, opened: steps, and what takes them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cosmati.cli.column_keys import NO_RIGHTS, ReadingRights, opened_ledger
from cosmati.cli.errors import STOPPED
from cosmati.errors import CosmatiError, LedgerError
from cosmati.ledger.difference import LedgerDifference
from cosmati.ledger.evidence import NOBODY, TrustedEvidence, is_witnessed
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.replay_result import ReplayResult, SegmentResult
from cosmati.ledger.row_blinds import FileOfBlinds, RecordedBlinds, Substituted, secrets_in, secrets_of_run
from cosmati.ledger.row_secrets import KEYS_FILE, SALT_FILE, RowSecrets
from cosmati.ledger.sealing import KEY_FILE, SEALED, ColumnKeys, OperatorKeys
from cosmati.ledger.spot_check import result_of
from cosmati.ledger.standing import StandingSteps
from cosmati.progress import ProgressDisplay

if TYPE_CHECKING:
    from cosmati.core.source import Source
    from cosmati.recipes.replaying import Without
    from cosmati.train.replay import MakeTrainer, ReplayFound

RecipeSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="As it was given to `cosmati train`.")
]
_TOLD = 8


@dataclass
class AskedReplay:
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
        self.blinds = self._opened_blinds()
        self.substituted: dict[str, Substituted] = {}
        folder = self.checkpoint or self.directory.parent / "checkpoints"
        self.checkpoints = folder if self.checkpoint or folder.is_dir() else None

    def _opened_blinds(self) -> RowSecrets | None:
        if self.rows:
            return secrets_in(self.run, self.rows.read_bytes())
        private = self.directory.parent / "private"
        has_any = any(_can_read(private / name) for name in (KEYS_FILE, SALT_FILE))
        return secrets_of_run(self.run, private) if has_any else None

    def _make(self) -> MakeTrainer:
        from cosmati.cli.files import load_recipe
        from cosmati.recipes.replaying import trainers_of

        return trainers_of(load_recipe(self.recipe, self.settings), self._without())

    def _without(self) -> Without | None:
        """Return what puts tombstones in place of what the run has forgotten: as its private folder or --rows says."""
        from cosmati.forget.past_run import Gone

        folder, salt = self.directory.parent, salt_of(self.directory)
        if salt is not None and Gone.is_kept(folder):
            known = salt

            def without(asked: str, source: object) -> Source:
                gone = Gone.after(folder, asked)
                made = gone.of(source, known)
                self.substituted[asked] = Substituted(tuple(sorted(gone.classes)), gone.rows, made.digest)
                return made

            return without
        told = self.blinds.substituted if isinstance(self.blinds, FileOfBlinds) else {}
        return (lambda asked, source: Gone.told(told, asked, source)) if told else None

    def recorded(self, segment: range) -> bytes:
        """Replay a segment, and return the file of its blinds.

        Raises:
            LedgerError: the run's row keys aren't here, or the steps don't come out the same.
        """
        if self.blinds is None:
            raise LedgerError(f"{self.directory} has no row keys beside it: only the operator has them. Give RUN.")
        self.blinds = recorder = RecordedBlinds(self.blinds, segment)
        found = self.replay_one(segment, keep_going=False)
        if found.is_interrupted:
            raise typer.Exit(STOPPED)
        if found.num_differences:
            msg = f"The steps don't come out as the ledger has them ({found.differences[0]}), so these aren't its rows."
            raise LedgerError(f"{msg} Give the run's own recipe and data.")
        return recorder.to_bytes(self.run, self.substituted)

    def replay_one(self, segment: range, *, keep_going: bool) -> ReplayFound:
        """Replay a segment from the nearest checkpoint."""
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
        """Replay segments, together where they're on one way, and say what that costs."""
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

        # The file goes to others, and into bundles.
        seals = any(SEALED in tables.details for tables in self.ledger.tables)
        in_words = LedgerDifference.without_sealed if seals else str
        segments = [
            SegmentResult(
                first=one.segment.start,
                end=one.segment.stop,
                start=one.start,
                from_entry_0=one.from_entry_0,
                outcome=one.outcome,
                num_differences=one.num_differences,
                differences=tuple(map(in_words, one.differences[:_TOLD])),
            )
            for one in found
        ]
        return result_of(
            self.ledger,
            self.run,
            segments,
            seed=seed,
            witnessed=is_witnessed(self.directory, self.ledger.head, self.trusted),
            compares_rows=bool(found) and all(one.compares_rows and not one.forgotten_by for one in found),
            skipped=sorted({name for one in found for name in one.skipped}),
            doubts=list(dict.fromkeys(doubt for one in found for doubt in one.doubts)),
            environment=describe_environment(torch.device("cpu")),
        )


def parse_steps(steps: str, num_steps: int) -> tuple[int, int]:
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


def _can_read(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # An auditor isn't let into the private folder.
        return False


def salt_of(directory: Path) -> bytes | None:
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
