"""A log of no entries has a root, too: who signs another one, or pinned one, is told."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cosmati.errors import TamperError
from cosmati.ledger.note import TreeHead
from cosmati.ledger.reader import Scan

EMPTY = hashlib.sha256().digest()


@pytest.mark.parametrize(
    ("signed", "pinned", "said"),
    [
        (EMPTY, EMPTY, ""),
        (bytes(32), EMPTY, "don't give the root that the checkpoint signs"),
        (EMPTY, bytes(32), "The first 0 entries in .* aren't those of the earlier checkpoint"),
    ],
)
def test_the_root_of_nothing_is_checked(signed: bytes, pinned: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "details.jsonl").touch()
    scan = Scan(tmp_path, TreeHead(0, signed), [TreeHead(0, pinned)])
    if said:
        with pytest.raises(TamperError, match=said):
            list(scan)
    else:
        assert list(scan) == []
