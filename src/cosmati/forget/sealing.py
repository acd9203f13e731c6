"""What a replay seals: all that the run has come to seal, with the run's own secret."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cosmati.errors import LedgerError
from cosmati.forget.past_run import PastRun
from cosmati.ledger.sealing import KEY_FILE, SEALED, OperatorKeys
from cosmati.ledger.tables import Tables
from cosmati.train.sensitive import sensitive_of
from cosmati.train.trainer import Trainer


def with_sealing_of(last: Tables, tables: Tables) -> Tables:
    """Return tables that say what is sealed as the run's last ones do: of that nothing comes into the open again."""
    if SEALED not in last.details or tables.details.get(SEALED) == last.details[SEALED]:
        return tables
    own = {**dict(tables.entry.commitments), SEALED: dict(last.entry.commitments)[SEALED]}
    entry = replace(tables.entry, commitments=tuple(sorted(own.items())))
    return replace(tables, entry=entry, details={**tables.details, SEALED: last.details[SEALED]})


def why_not_sealed(run: PastRun, trainer: Trainer) -> Iterator[str]:
    """Yield why a trainer wouldn't seal what the run has sealed.

    Its resume refuses that, but in the successor: then the run is already succeeded by what can't go on.
    """
    told = run.ledger.tables[-1].details.get(SEALED)
    if not told:
        return
    prepared = trainer.prepared
    now = sensitive_of(prepared.given, trainer.assembly.policy, prepared.vouched)
    if lost := sorted({*told["classes"]} - {*now}):
        names = ", ".join(lost)
        yield f"the run seals columns of {names}, and the recipe doesn't: give the one that it ended with"
    path = run.folder / "private" / KEY_FILE
    try:
        is_own = OperatorKeys(path.read_bytes(), run.ledger.key.name).commitment.hex() == told["key"]
    except (OSError, LedgerError):
        is_own = False
    if not is_own:
        yield f"{path} isn't there, or isn't the secret that columns are sealed with: put the run's own back"
