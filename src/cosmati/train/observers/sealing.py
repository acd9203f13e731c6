"""Seals the columns of a run's sensitive classes in what its ledger says of a step; the operator has the secret."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cosmati.errors import LedgerError
from cosmati.ledger.details import decode_details, details_digest
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.sealing import (
    BLOCK_STEPS,
    KEY_FILE,
    SEALED,
    SECRET_BYTES,
    OperatorKeys,
    divided,
    seal_names,
    sealed,
)
from cosmati.records.ledger import AmendEntry, MicrobatchCell, RunEntry
from cosmati.routing.policy import CompiledPolicy
from cosmati.storage.atomic import create_secret


class StepSealing:
    """What is sealed of a run's steps, and with what.

    Args:
        sensitive: the run's sensitive classes.
        keys: made from the operator's secret; None where no class is sensitive, or nothing is written.
    """

    def __init__(self, sensitive: Sequence[str] = (), keys: OperatorKeys | None = None) -> None:
        self._sensitive, self._keys = tuple(sensitive), keys

    @classmethod
    def of_run(
        cls, private: Path, origin: str, sensitive: Sequence[str], entries: Sequence[ScannedEntry]
    ) -> StepSealing:
        """Open the sealing of a run: with a new secret where it begins, and with its own where it goes on.

        Args:
            private: folder of the operator's secrets.
            origin: name of the log.
            sensitive: the classes.
            entries: of the ledger, all but steps; none where the run begins.

        Raises:
            LedgerError: the secret is gone, or another one; or what was sealed so far wouldn't be from here on.
        """
        before = _in_force(entries)
        if lost := sorted({*before.get("classes", ())} - {*sensitive}):
            msg = f"Columns of {', '.join(lost)} are sealed in this ledger, and the run would put them in the open from"
            raise LedgerError(f"{msg} here on. Give RunConfig(sensitive=...) and the taxonomy that it began with.")
        if not sensitive:
            return cls()
        path = private / KEY_FILE
        if not before and path.exists() and path.stat().st_size != SECRET_BYTES:
            path.unlink()  # A crash has cut it, before anything was sealed with it.
        if not path.exists():
            if before:
                raise LedgerError(f"{path} is gone, and columns are sealed with it. Put the run's own back.")
            private.mkdir(mode=0o700, exist_ok=True)
            create_secret(path, secrets.token_bytes(SECRET_BYTES))
        keys = OperatorKeys(path.read_bytes(), origin)
        if before.get("key") not in (None, keys.commitment.hex()):
            raise LedgerError(f"{path} isn't the secret that columns are sealed with. Put the run's own back.")
        return cls(sensitive, keys)

    @property
    def table(self) -> dict[str, object]:
        """What entry 0 says: which classes are sealed, by how many steps a key changes, and of which secret."""
        if self._keys is None:
            return {}
        key = self._keys.commitment.hex()
        return {SEALED: {"classes": list(self._sensitive), "block_steps": BLOCK_STEPS, "key": key}}

    @property
    def commitment(self) -> dict[str, bytes]:
        """What entry 0 commits to of that."""
        return {SEALED: details_digest(self.table)} if self._keys is not None else {}

    def seal(
        self, details: dict[str, Any], cells: Sequence[MicrobatchCell], step: int, policy: CompiledPolicy | None
    ) -> dict[str, Any]:
        """Return the details of a step with what tells of sensitive classes sealed."""
        if self._keys is None or policy is None:
            return details
        clear, parts = divided(details, cells, seal_names(policy.classes, self._sensitive))
        return sealed(clear, parts, self._keys, step)


def _in_force(entries: Sequence[ScannedEntry]) -> Mapping[str, Any]:
    told = [i.details for i in entries if isinstance(i.entry, RunEntry | AmendEntry) and i.details is not None]
    return cast("Mapping[str, Any]", decode_details(told[-1]).get(SEALED, {})) if told else {}
