"""Which classes are sensitive: those of which a ledger measures nothing in the open.

The data authority says so in the taxonomy that it publishes. A run may add classes, and take none away.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cosmati.records.joint_classes import is_joint

_TAXONOMY = "/targets/taxonomy/"


def marked_in(archive: Mapping[str, bytes]) -> frozenset[str]:
    """Return what the taxonomies in an archive call sensitive, classes and branches.

    Args:
        archive: an authority's files by `ROOT/FILE`, verified before, as `VouchedData.archive` has them.
    """
    found = set[str]()
    for name, data in archive.items():
        if _TAXONOMY in name:
            found |= {str(one) for one in _read(data).get("sensitive", ())}
    return frozenset(found)


def _read(data: bytes) -> Mapping[str, Any]:
    told = json.loads(data)
    return told if isinstance(told, dict) else {}


def sensitive_classes(classes: Sequence[str], marked: Iterable[str]) -> tuple[str, ...]:
    """Return those of some classes that are marked, or are below a marked branch; joint ones are named by none."""
    under = tuple(marked)
    return tuple(
        name
        for name in classes
        if not is_joint(name) and any(name == one or name.startswith(f"{one}/") for one in under)
    )
