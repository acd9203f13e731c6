"""Which sources a class's rows came from, and under which licence: what entry 0 and amendments say, and the archive.

The archive beside a ledger keeps each signed manifest under its SHA-256, which the entry names. Nothing is taken from a
file that has another one. That the signatures hold is asked elsewhere (`cosmati ledger verify`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmati.ledger.tables import Tables
from cosmati.records.joint_classes import joint_name

ARCHIVE = "provenance"


@dataclass(frozen=True, slots=True)
class SourceOfClass:
    """A signed source.

    Attributes:
        class_name: What its rows are.
        target: Path under which it was signed.
        licence: What its manifest says; empty where that says nothing, or the archive doesn't have it.
        valid_until: Last day of the licence, likewise.
        origin: Where the rows came from, likewise.
        obtained: How they were got, likewise.
        manifest_sha256: Of its manifest, in hexadecimal.
    """

    class_name: str
    target: str
    licence: str
    valid_until: str
    origin: str
    obtained: str
    manifest_sha256: str


def sources_of(ledger: Path, tables: Tables) -> tuple[SourceOfClass, ...]:
    """Return the signed sources that an entry names; none where nobody vouched for the data.

    Args:
        ledger: the ledger's folder, with the archive in it.
        tables: what the entry says.
    """
    told = (tables.details.get("provenance") or {}).get("sources") or ()
    return tuple(_source(ledger, str(one["target"]), str(one["manifest_sha256"])) for one in told)


def _source(ledger: Path, target: str, digest: str) -> SourceOfClass:
    manifest = _manifest(ledger / ARCHIVE / digest, digest) if len(digest) == 64 and digest.isalnum() else {}
    facts = manifest.get("facts") or {}
    path = manifest.get("class_path", "/".join(target.split("/")[1:-2]))
    return SourceOfClass(
        class_name=joint_name((path, *manifest.get("also", ()))),
        target=target,
        licence=facts.get("licence", ""),
        valid_until=facts.get("licence_valid_until", ""),
        origin=facts.get("origin", ""),
        obtained=facts.get("obtained", ""),
        manifest_sha256=digest,
    )


def _manifest(path: Path, digest: str) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    found = json.loads(data) if hashlib.sha256(data).hexdigest() == digest else {}
    return found if isinstance(found, dict) else {}
