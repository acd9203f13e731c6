"""Shredding: the keys of forgotten rows leave the run, and the runs that it succeeds.

Afterwards nobody, the operator with all his files included, can confirm a guess at such a row's id and content by the
ledger's commitments. Losses and norms of the steps that had it stay: numbers over all rows of a microbatch. It comes
after the replay, whose steps it leaves as they are.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cosmati.errors import ForgetError
from cosmati.forget.asked import ToForget
from cosmati.forget.contact import rows_of_classes
from cosmati.forget.making import Make
from cosmati.forget.past_run import PastRun
from cosmati.forget.succession import EARLIER, REQUEST
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.row_secrets import KEYS_FILE

KEPT, SHREDDED, SALTED = "kept", "shredded", "salted"
"""What a certificate says of row keys: that they're there, that they're gone, that there's one salt for all rows."""
NOT_SHREDDED = {
    KEPT: "the row keys, private/rows.keys: who has them can confirm a guess at a row; --delete-superseded shreds them",
    SALTED: "the salt of all rows, private/rows.salt, which can't forget some: who has it can confirm a guess at a row",
}
WORDS = "the row keys are shredded: without an older copy of them no commitment confirms a guess at a row any more"


@dataclass(frozen=True)
class Shredded:
    """What became of row keys.

    Attributes:
        status: `kept`, `shredded` or `salted`.
        missing: folders of superseded runs that aren't there: what became of theirs nobody here can say.
    """

    status: str
    missing: tuple[str, ...] = ()

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What a certificate says isn't covered."""
        gone = (f"the row keys of {one}, which isn't where it was: delete them there" for one in self.missing)
        return (*([NOT_SHREDDED[self.status]] if self.status in NOT_SHREDDED else []), *gone)


@dataclass(frozen=True)
class LostKeys:
    """Whose keys go.

    Attributes:
        rows: ids of rows.
        classes: names of classes: with a class's key go all that took part as a row of it.
    """

    rows: Collection[int] = ()
    classes: Collection[str] = ()


def kept_keys(out: Path) -> Shredded:
    """Return what a run's row keys are before anything is shredded."""
    return Shredded(KEPT if (out / "private" / KEYS_FILE).exists() else SALTED)


def shred(run: PastRun, lost: LostKeys, out: Path, certificate: tuple[str, int]) -> Shredded:
    """Take the keys of what was forgotten out of a run and all that it succeeds; what's gone stays gone.

    Args:
        run: that had the content.
        lost: whose keys go.
        out: the run without it.
        certificate: of the deletion: its digest and number.

    Raises:
        LedgerError: keys are damaged.
    """
    if kept_keys(out).status == SALTED:
        return Shredded(SALTED)
    tree, missing = RowKeys.load(out / "private" / KEYS_FILE).commitment, []
    for folder in [out, run.folder, *superseded_by(run.folder)]:
        path = folder / "private" / KEYS_FILE
        keys = RowKeys.load(path) if path.exists() else None
        if not folder.exists() or (keys is not None and keys.commitment != tree):  # another run is where it was
            missing.append(str(folder))
        elif keys is not None:
            before = keys.to_bytes()
            keys.forget(lost.rows)
            keys.forget_classes(lost.classes)
            if keys.to_bytes() != before:
                digest, number = certificate
                keys.certificates = {**keys.certificates, digest: number}
                keys.save(path)
    return Shredded(SHREDDED, tuple(missing))


def keys_to_lose(run: PastRun, asked: ToForget, names: Collection[str], make: Make | None) -> LostKeys:
    """Return the rows and the classes whose keys go; every rank must ask, since a trainer may have to be made.

    Args:
        run: that had the content.
        asked: what was forgotten.
        names: of the classes, where classes are asked for.
        make: makes the run's trainer; needed for classes that the ledger doesn't tell apart.

    Raises:
        ForgetError: which rows are of the classes nobody can tell.
    """
    if kept_keys(run.folder).status == SALTED:
        return LostKeys()
    if asked.rows or all(tables.policy for tables in run.ledger.tables):
        return LostKeys(asked.rows, () if asked.rows else names)
    if make is None:
        msg = "Which rows are of these classes only the run's data tell. Give its recipe: --recipe FILE[:FUNCTION]."
        raise ForgetError(msg)
    trainer = make(lambda source: run.gone.of(source, run.salt), run.folder)
    try:
        return LostKeys(rows_of_classes(run, trainer, names))
    finally:
        if trainer.feed is not None:
            trainer.feed.close()


def superseded_by(folder: Path) -> list[Path]:
    """Return the folders of the runs that a run succeeds, the last one first, also of those that are gone.

    An ablated run has a log and keys of its own: it succeeds none.
    """
    try:
        told = json.loads((folder / REQUEST).read_text())
        before, is_own = Path(told["run"]), told["method"] == "ablate"
    except (OSError, ValueError, KeyError):
        return []
    if is_own:
        return []
    # Where one of them is gone, only this says which ones it had succeeded.
    return [before, *(superseded_by(before) or map(Path, told.get(EARLIER, ())))]
