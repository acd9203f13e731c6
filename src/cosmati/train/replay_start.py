"""Where a replay begins: at the nearest model checkpoint that the ledger has signed, or at entry 0."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cosmati.errors import CheckpointError, LedgerError, RefutedError
from cosmati.ledger.difference import LedgerDifference
from cosmati.ledger.standing import StandingSteps
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, read_checkpoint


@dataclass(frozen=True, kw_only=True)
class From:
    """Where a replay begins: at entry 0, or at a model checkpoint that the ledger has signed.

    Attributes:
        step: number of the first step to take.
        path: folder of the checkpoint; None begins at entry 0.
        unsigned: checkpoints that were passed over, since the ledger has signed others.
    """

    step: int = 0
    path: Path | None = None
    unsigned: tuple[LedgerDifference, ...] = ()

    def load(self, run: StandingSteps) -> Checkpoint | None:
        """Read the checkpoint; None where there is none.

        Raises:
            CheckpointError: it isn't there any more, or another one is in its place.
        """
        if self.path is None:
            return None
        checkpoint = read_checkpoint(self.path)
        if checkpoint.signed_digest not in [one.state_digest for one in run.checkpoints[self.step]]:
            raise CheckpointError(f"{self.path} was exchanged just now. Replay again.")
        return checkpoint


def nearest_checkpoint(run: StandingSteps, step: int, folder: Path | None) -> From:
    """Return the nearest checkpoint at or before a step that the ledger has signed, and that lies on what stands.

    Args:
        run: the steps that stand.
        step: number of the first step that is wanted.
        folder: with `step-...` folders in it, or one of these; None for none.

    Raises:
        LedgerError: the one that was given is of a later step, or of an attempt that was superseded. RefutedError: the
        ledger has signed another one. CheckpointError: it's damaged.
    """
    if folder is not None and (folder / "state.json").exists():
        return _only(run, step, folder)
    unsigned = list[LedgerDifference]()
    for path in [] if folder is None else list_checkpoints(folder):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError:
            continue  # Damaged, or a running process has just removed it.
        if not 0 < checkpoint.step <= step:
            continue  # At step 0 the recipe's own model shows more.
        if (why := _unlike_signed(run, path, checkpoint)) is None:
            return From(step=checkpoint.step, path=path, unsigned=tuple(unsigned))
        if why:
            unsigned.append(why)
    return From(unsigned=tuple(unsigned))


def _only(run: StandingSteps, step: int, path: Path) -> From:
    checkpoint = read_checkpoint(path)
    if checkpoint.step > step:
        msg = f"{path} holds the state after {checkpoint.step} steps, and step {step} was asked for."
        raise LedgerError(f"{msg} Give an earlier one, or none.")
    why = _unlike_signed(run, path, checkpoint)
    if why is not None:
        if not why:
            raise LedgerError(f"{path} is of an attempt that was superseded. Give another one, or none.")
        raise RefutedError(f"{why}: weights or state were exchanged.")
    return From(step=checkpoint.step, path=path)


def _unlike_signed(run: StandingSteps, path: Path, checkpoint: Checkpoint) -> LedgerDifference | Literal[""] | None:
    """Return how a checkpoint differs from what was signed; nothing where it was superseded, None where it's that."""
    digest = checkpoint.signed_digest
    signed = [one.state_digest for one in run.checkpoints.get(checkpoint.step, ())]
    if digest in signed:
        return None
    if (checkpoint.step, digest) in run.signed_states:
        return ""
    was = signed[-1].hex()[:16] if signed else "no such checkpoint"
    return LedgerDifference(None, f"digest of the checkpoint {path.name}", was, digest.hex()[:16])
