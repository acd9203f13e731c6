"""Which sources a class's rows came from, and under which licence: what entry 0 and amendments say, and the archive.

The archive beside a ledger keeps each signed manifest under its SHA-256, which the entry names. Nothing is taken from a
file that has another one. That the signatures hold is asked elsewhere (`cosmati ledger verify`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmati.ledger.tables import Tables
from cosmati.records.foreign_json import read_foreign_json
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
    path, also, facts = (manifest.get(name) for name in ("class_path", "also", "facts"))
    classes = [path if isinstance(path, str) else "/".join(target.split("/")[1:-2])]
    classes += [one for one in also if isinstance(one, str)] if isinstance(also, list) else []
    told = {name: text for name, text in facts.items() if isinstance(text, str)} if isinstance(facts, dict) else {}
    return SourceOfClass(
        class_name=joint_name(classes),
        target=target,
        licence=told.get("licence", ""),
        valid_until=told.get("licence_valid_until", ""),
        origin=told.get("origin", ""),
        obtained=told.get("obtained", ""),
        manifest_sha256=digest,
    )


def _manifest(path: Path, digest: str) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    try:
        found = read_foreign_json(data) if hashlib.sha256(data).hexdigest() == digest else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
