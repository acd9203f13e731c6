"""Whether what a run is vouched for by are a rehearsal's keys: an authority's first root says so, and is pinned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REHEARSAL = "x-cosmati-rehearsal"
"""Field of the first root of an authority all of whose keys were made for show."""
SAYS = "a rehearsal's, whose keys were all made by one program: it shows that signatures are followed, and nothing else"


def rehearsed(archive: Path, facts: Iterable[Mapping[str, Any] | None]) -> tuple[str, ...]:
    """Return the authorities that say of themselves that they're a rehearsal: SHA-256 of their first roots, in hex.

    A root is named by the digest of its content. So nobody who has pinned it can be told otherwise, and nobody who
    keeps the archive can leave it out or put it in.

    Args:
        archive: folder of a ledger's archive.
        facts: what the ledger says of who vouches, as `VouchedData.facts` has it.
    """
    roots = {str(one["root"]) for told in facts if told is not None for one in told["sources"]}
    return tuple(sorted(root for root in roots if root.isalnum() and _says_so(archive / root, root)))


def _says_so(path: Path, root: str) -> bool:
    try:
        data = path.read_bytes()
        return hashlib.sha256(data).hexdigest() == root and json.loads(data)["signed"].get(REHEARSAL) is True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
