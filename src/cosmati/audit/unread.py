"""Which files of a bundle no check reads: its list names them, and nothing here says what they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cosmati.audit.bundle import LIST_FILE, LIST_STATEMENT, sha256_of
from cosmati.audit.enclosed import CERTIFICATES, REPLAYS
from cosmati.audit.export import (
    ABOUT,
    EXCLUSIONS,
    FIGURES,
    LEDGER,
    README_FILE,
    TRAINING,
    WEIGHTS,
    WEIGHTS_KEY,
    WEIGHTS_SIGNATURE,
)
from cosmati.audit.rights import CREDENTIAL, KEYS
from cosmati.ledger.cosigned import FOLDER as COSIGNED
from cosmati.ledger.details import DETAILS_FILE
from cosmati.ledger.reader import CHECKPOINT_FILE, VKEY_FILE
from cosmati.provenance.voucher import FOLDER as ARCHIVE

_READ = {
    *(ABOUT, FIGURES, LIST_FILE, LIST_STATEMENT, README_FILE, TRAINING, EXCLUSIONS, WEIGHTS_KEY, WEIGHTS_SIGNATURE),
    *(CREDENTIAL, KEYS),
    *(f"{LEDGER}/{name}" for name in (CHECKPOINT_FILE, VKEY_FILE, DETAILS_FILE)),
}
_FOLDERS = (f"{WEIGHTS}/", f"{CERTIFICATES}/", f"{REPLAYS}/", "documents/")
"""Of which each file is checked."""
_NUMBERED = re.compile(rf"{LEDGER}/({COSIGNED}/\d+|tile/(entries|\d)/(x\d{{3}}/)*\d{{3}}(\.p/[1-9]\d{{0,2}})?)")
_ARCHIVED = re.compile(rf"{LEDGER}/{ARCHIVE}/([0-9a-f]{{64}})")


def unread_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Return those of a bundle's files that no check reads, sorted.

    Args:
        folder: where it was unpacked.
        names: of all its files.
    """
    return sorted(name for name in names if not _is_read(folder, name))


def _is_read(folder: Path, name: str) -> bool:
    archived = _ARCHIVED.fullmatch(name)
    if archived is not None:  # what nothing refers to says nothing, and can't be taken for another
        return sha256_of(folder / name) == archived[1]
    return name in _READ or name.startswith(_FOLDERS) or _NUMBERED.fullmatch(name) is not None
