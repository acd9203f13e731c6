"""What a program that had content forgotten tells about it: the content of `deleted.json` in the successor's folder.

Nothing signs it: a certificate says what was done, and the ledger what was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

from cosmati.records.encoding import FileRecord

DELETED_VERSION = 1
DELETED_FILE = "deleted.json"


@dataclass(frozen=True)
class TaughtRecord:
    """What the rows taught a region before.

    Attributes:
        region: its name.
        num_rows: of the rows, each at each visit.
        num_steps: that gave it any.
    """

    region: str
    num_rows: int
    num_steps: int


@dataclass(frozen=True)
class MeasureRecord:
    """A figure of the run that had the rows, and of the one that never had them.

    Attributes:
        name: what was measured, with its unit.
        before: of the run that had them.
        after: of the run that never had them.
        is_attack: whether it's what somebody finds who wants to know whether they were there.
    """

    name: str
    before: float
    after: float
    is_attack: bool = False


@dataclass(frozen=True, kw_only=True)
class DeletedRecord(FileRecord):
    """What was forgotten, in words that a certificate doesn't have, and what was measured.

    Attributes:
        certificate: SHA-256 of the certificate's file that it's about, in hex.
        what: a name for the rows, such as a package's.
        class_name: of the rows.
        num_rows: of them in the data.
        steps: that had any of them, rising.
        taught: by region.
        measures: before and after.
        seconds: that the replay trained.
        notes: whatever a reader must know besides.
        version: of this record's form.
    """

    version: int = DELETED_VERSION
    certificate: str
    what: str
    class_name: str
    num_rows: int
    steps: tuple[int, ...]
    taught: tuple[TaughtRecord, ...]
    measures: tuple[MeasureRecord, ...]
    seconds: float
    notes: tuple[str, ...] = ()
