"""Where the ledger is that a command was pointed to."""

from __future__ import annotations

from pathlib import Path

from cosmati.errors import LedgerError


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
