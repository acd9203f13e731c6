"""Derived tables for somebody who may read sealed columns: in memory, since the files are for everybody."""

from __future__ import annotations

from cosmati.ledger.columns import ColumnScan, StepBlock
from cosmati.ledger.derived.opened import DerivedLedger
from cosmati.ledger.derived.rows import PartRows, RegionSets
from cosmati.ledger.note import TreeHead
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.sealing import ColumnKeys
from cosmati.records.ledger import AmendEntry, RunEntry

_OPENED = ("steps", "norms", "sealed", "directions", "entropies", "updates")


def open_columns(derived: DerivedLedger, keys: ColumnKeys) -> None:
    """Let a ledger's derived tables hold what the keys open, on this connection alone; all signed entries are read.

    Raises:
        TamperError: the ledger doesn't verify, or something that is sealed doesn't open with its key.
    """
    head = TreeHead(derived.index.tree_size, bytes.fromhex(derived.index.root))
    rows, epoch = PartRows(RegionSets(), derived.index.origin, keys), -1
    for one in ColumnScan(derived.ledger, head).blocks():
        if isinstance(one, StepBlock):
            rows.take(one, epoch)
        else:
            assert isinstance(one, ScannedEntry), "what isn't a block of steps"
            epoch += isinstance(one.entry, RunEntry | AmendEntry)
    found = rows.columns()
    for table in _OPENED:
        derived.put(f"opened_{table}", found[table])
        derived.database.execute(f"CREATE OR REPLACE VIEW {table}_file AS SELECT * FROM opened_{table}")
