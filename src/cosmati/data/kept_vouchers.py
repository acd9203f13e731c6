"""What a run has kept of those who vouched for its data, for when it's resumed and they do no longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cosmati.errors import ProvenanceError
from cosmati.ledger.details import decode_details
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.provenance.voucher import FOLDER, VouchedData, Voucher
from cosmati.records.ledger import AmendEntry, RunEntry


def kept_vouchers(run: Path) -> tuple[VouchedData, ...]:
    """Return what a run's ledger says of them, oldest first, each borne out by its archive; nothing without a ledger.

    Args:
        run: the run's folder.

    Raises:
        TamperError: the ledger doesn't verify.
        ProvenanceError: the archive doesn't bear it out.
    """
    from cosmati.provenance.authority.audit import audit

    directory, found = run / "ledger", list[VouchedData]()
    if not (directory / "checkpoint").exists():
        return ()
    for item in Scan(directory, read_head(directory, read_verifier_key(directory))):
        details = decode_details(item.details) if isinstance(item.entry, RunEntry | AmendEntry) and item.details else {}
        facts: Any = details.get("provenance")
        if facts is None or (found and found[-1].facts == facts):
            continue
        if problems := audit(directory / FOLDER, facts):
            msg = (
                f"What {run} has kept of those who vouched for its data doesn't hold: {'; '.join(problems)}. Restore "
                "the run's ledger folder."
            )
            raise ProvenanceError(msg)
        vouchers = tuple(Voucher(**{**one, "keyids": tuple(one["keyids"])}) for one in facts["sources"])
        archive = {name: (directory / FOLDER / digest).read_bytes() for name, digest in facts["archive"].items()}
        found.append(VouchedData(facts["opened"], vouchers, archive))
    return tuple(found)
