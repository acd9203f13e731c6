"""Where the ledger is that a command was pointed to, who has to have seen it, and how much of it isn't signed yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.errors import LedgerError
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.wal import WAL_FILE, read_wal

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its ledger folder.")]
Key = Annotated[str | None, typer.Option("--vkey", help="The operator's verifier key, from a source you trust.")]
Witnesses = Annotated[
    list[str] | None,
    typer.Option("--witness", metavar="VKEY", help="A witness's key, from a source you trust: has it seen the ledger?"),
]
Quorum = Annotated[int, typer.Option(help="How many of the witnesses have to have seen it; all if left out.")]
ReplayFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Result of a replay that you have run, or whose auditor you trust."),
]


def ledger_of(folder: Path) -> Path:
    """Return the ledger's folder, whichever of the two was given."""
    folder = _run_around(folder)
    found = folder / "ledger" if (folder / "ledger").is_dir() else folder
    if not any((found / name).exists() for name in ("checkpoint", "operator.vkey", "details.jsonl")):
        msg = f"There is no ledger in {folder}. Give a run folder with a `ledger` folder in it, or that folder itself."
        raise LedgerError(msg)
    return found


def _run_around(folder: Path) -> Path:
    """Return the run that a checkpoint, its weights, or the folder of all of them belongs to; else what was given."""
    place = folder.resolve()
    around = next((one.parent for one in (place, *place.parents[:2]) if one.name == "checkpoints"), folder)
    return around if (around / "ledger").is_dir() and not (folder / "ledger").is_dir() else folder


def opened(folder: Path, vkey: str | None, trusted: TrustedEvidence) -> tuple[VerifiedLedger, str]:
    """Verify a ledger, and say how much of it isn't signed yet, so that no answer is about it; empty for nothing."""
    directory = ledger_of(folder)
    waiting = Waiting(directory)
    ledger = VerifiedLedger(directory, vkey, trusted)
    return ledger, waiting.beyond(ledger.head.size)


class Waiting:
    """What waits in the write-ahead log, read before the checkpoint: a live writer replaces the log after it."""

    def __init__(self, directory: Path) -> None:
        self._indices = list(read_wal(directory).entries) if (directory / WAL_FILE).exists() else []

    def beyond(self, size: int) -> str:
        """Say how many entries a head of that size doesn't cover; empty for none."""
        num = sum(index >= size for index in self._indices)
        return f"{num} further entries aren't signed yet, and weren't read." if num else ""
