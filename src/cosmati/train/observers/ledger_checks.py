"""What a resume asks of a run's ledger before it goes on with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from cosmati.errors import CheckpointError, LedgerError
from cosmati.ledger.details import decode_details
from cosmati.ledger.keys import load_or_create_key
from cosmati.ledger.reader import Scan, ScannedEntry, read_head, read_verifier_key
from cosmati.ledger.roots import FORGOTTEN
from cosmati.ledger.wal import WAL_FILE, read_wal
from cosmati.ledger.writer import LedgerWriter
from cosmati.provenance.voucher import Withdrawn
from cosmati.records.ledger import AmendEntry, CheckpointEntry, RunEntry, StepEntry, TimeEntry


def rare_entries(ledger: Path) -> Iterator[ScannedEntry]:
    """Yield what a ledger has signed but for its steps."""
    for item in Scan(ledger, read_head(ledger, read_verifier_key(ledger))):
        if not isinstance(item.entry, StepEntry):
            yield item


def refuse_unsigned(items: Sequence[ScannedEntry], step: int, state_digest: bytes) -> None:
    """Compare a checkpoint with what the ledger has signed: `digests.json` can be made anew, a signature can't."""
    entries = (item.entry for item in items)
    if not any(isinstance(e, CheckpointEntry) and (e.step, e.state_digest) == (step, state_digest) for e in entries):
        msg = (
            f"The checkpoint of step {step} isn't one that the ledger has signed: weights or state were exchanged. Put "
            "the run's own checkpoint back, or go on from an earlier one."
        )
        raise CheckpointError(msg)


def refuse_readmission(items: Sequence[ScannedEntry], now: Withdrawn | None) -> None:
    """Refuse to go on with classes that the ledger has rejected since nobody vouches for them."""
    before, here = _last_withdrawn(items), {one.class_path for one in now.in_force} if now is not None else set()
    for one in before.in_force if before is not None else ():
        if one.action == "reject" and one.class_path not in here:
            msg = (
                f"The ledger says that {one}. The run can't take its rows again: resume with the data's authority "
                "(StreamingDataset(..., authority=...)), or begin another run."
            )
            raise LedgerError(msg)


class Recorded(NamedTuple):
    """What a run's ledger says to who goes on with it.

    Attributes:
        withdrawn: from the run; None for nothing.
        last_time: that it knows of, whatever a clock says now; None without a ledger.
    """

    withdrawn: Withdrawn | None = None
    last_time: datetime | None = None


def recorded_in(run_folder: Path | None) -> Recorded:
    """Return what a run's ledger says to who goes on with it.

    What a crash has left unsigned is signed first: it's in force, too.

    Raises:
        TamperError: the ledger doesn't verify.
    """
    items = signed_entries(run_folder) if run_folder is not None else []
    return Recorded(_last_withdrawn(items), max(_times(items), default=None))


def _times(items: Iterable[ScannedEntry]) -> Iterator[datetime]:
    """Yield what clocks have said: the operator's, and that by which those who vouch were asked."""
    for item in items:
        if isinstance(item.entry, TimeEntry):
            yield datetime.fromtimestamp(item.entry.seconds, UTC)
        elif isinstance(item.entry, RunEntry | AmendEntry) and item.details is not None:
            told = decode_details(item.details)
            for name, field in (("provenance", "opened"), ("policy_provenance", "opened"), ("withdrawn", "seen")):
                facts = cast("Mapping[str, Any]", told.get(name) or {})
                if facts.get(field):
                    yield datetime.fromisoformat(facts[field])


def policy_changes_in(run_folder: Path) -> list[dict[str, Any]]:
    """Return the changes of its policy that a run's ledger says to have been made without a stop, or to come.

    Raises:
        TamperError: the ledger doesn't verify.
    """
    return cast("list[dict[str, Any]]", _last_told(signed_entries(run_folder)).get("policy_changes", []))


def signed_entries(run_folder: Path) -> list[ScannedEntry]:
    """Return what a run's ledger has signed but for its steps; nothing where there's none.

    What a crash has left unsigned is signed first: it's in force, too.

    Raises:
        TamperError: the ledger doesn't verify.
    """
    if not (run_folder / "ledger" / "checkpoint").exists():
        return []
    directory = run_folder / "ledger"
    key = read_verifier_key(directory)
    size = read_head(directory, key).size
    if (directory / WAL_FILE).exists() and any(index >= size for index in read_wal(directory).entries):
        operator = load_or_create_key(run_folder / "private" / "operator.key", name=key.name)
        LedgerWriter.open(directory, key=operator).close()
    return list(rare_entries(directory))


def forgotten_in(items: Sequence[ScannedEntry]) -> dict[str, Any]:
    """Return what a ledger says of the last deletion, which its later entries say on; nothing where there was none."""
    told = _last_told(items)
    return {FORGOTTEN: told[FORGOTTEN]} if FORGOTTEN in told else {}


def _last_withdrawn(items: Sequence[ScannedEntry]) -> Withdrawn | None:
    found = _last_told(items).get("withdrawn")
    return None if found is None else Withdrawn.of_facts(cast("Mapping[str, Any]", found))


def _last_told(items: Sequence[ScannedEntry]) -> dict[str, Any]:
    """Return the details of the last amendment."""
    amendments = [item.details for item in items if isinstance(item.entry, AmendEntry) and item.details is not None]
    return decode_details(amendments[-1]) if amendments else {}
