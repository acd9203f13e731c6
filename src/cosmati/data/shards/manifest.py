"""The source manifest: what a source holds, whose it is and how it was come by, small enough to be signed.

The rows stand in it by a Merkle root (RFC 6962) over salted leaves, so that a row can be proved to be in it, and nobody
who guesses a row's content can find out whether it is. Signing is somebody else's: the manifest's SHA-256 is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import rfc8785
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from cosmati.data.graded import SourceKind
from cosmati.errors import DataError
from cosmati.records.joint_classes import joint_name
from cosmati.storage.atomic import create_secret
from cosmati.storage.merkle import leaf_hash

MANIFEST_FILE = "manifest.json"
SALT_FILE = "salt.key"
_CLASS_PATH = r"^[a-z0-9-]+(/[a-z0-9-]+)*$"
_HEX = r"^[0-9a-f]{64}$"
_Word = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Custody(_Model):
    """Who held the data, when, and what they did."""

    holder: str
    since: str
    did: str = ""


class SourceFacts(_Model):
    """What the writer says about a source; none of it can be checked against the rows.

    Attributes:
        origin: where the data come from: a URL, a name, a contract.
        obtained: how: downloaded, licensed, collected, generated.
        licence: SPDX identifier or the name of the contract.
        licence_valid_until: the licence's last day, `YYYY-MM-DD`; empty for no end.
        lawful_basis: for personal data.
        reservations: rights reservations as seen when it was fetched (robots.txt, C2PA, TDM), each a line.
        annotators: ids of people, and of label functions.
        custody: chain of custody, oldest first.
        notes: anything else.
    """

    origin: str = ""
    obtained: str = ""
    licence: str = ""
    licence_valid_until: str = Field(default="", pattern=r"^(\d{4}-\d{2}-\d{2})?$")
    lawful_basis: str = ""
    reservations: tuple[str, ...] = ()
    annotators: tuple[str, ...] = ()
    custody: tuple[Custody, ...] = ()
    notes: str = ""


class ShardDigest(_Model):
    """One shard in a manifest."""

    name: str
    sha256: str = Field(pattern=_HEX)
    rows: int = Field(ge=0)


class PackedRows(_Model):
    """What one class id means in the spans of packs.

    Attributes:
        class_path: class of the rows.
        band: quality band of the rows.
        grades: what else was measured of them, by measure.
        also: other classes to which they belong, too.
    """

    class_path: str = Field(pattern=_CLASS_PATH)
    band: int = Field(default=0, ge=0)
    grades: dict[_Word, _Word] = Field(default_factory=dict)
    also: tuple[Annotated[str, Field(pattern=_CLASS_PATH)], ...] = ()

    @classmethod
    def of(cls, class_path: str, kind: SourceKind) -> PackedRows:
        """Return it of a class and a kind of its rows."""
        return cls(class_path=class_path, band=kind.band, grades=dict(kind.grades), also=kind.also)

    @property
    def kind(self) -> SourceKind:
        """What was measured of the rows."""
        return SourceKind(self.band, tuple(sorted(self.grades.items())), self.also)


class SourceManifest(_Model):
    """A source: a version of a data set, all of one class.

    Attributes:
        version: of this format.
        source: name of the source.
        source_version: of its content.
        class_path: class of all its rows, under which it's signed.
        also: other classes to which they belong, too: they teach what all of these may.
        band: quality band of all its rows, where a policy tells bands apart; measured once, and signed with the shards.
        grades: what else was measured of all its rows, by measure: `{"evidence": "trial"}`; likewise.
        packed: of packs of several classes, what each class id in their spans means.
        num_rows: rows.
        num_bytes: of the uncompressed shards.
        shards: digests of the uncompressed shards, in order.
        row_root: Merkle root over the rows' leaves, in hex.
        salt_commitment: SHA-256 of the salt that the leaves are keyed with, in hex; the salt lies beside, not in it.
        facts: what the writer says.
    """

    version: Literal[1] = 1
    source: str
    source_version: str
    class_path: str = Field(pattern=_CLASS_PATH)
    band: int = Field(default=0, ge=0)
    grades: dict[_Word, _Word] = Field(default_factory=dict)
    also: tuple[Annotated[str, Field(pattern=_CLASS_PATH)], ...] = ()
    packed: tuple[PackedRows, ...] = ()
    num_rows: int = Field(ge=0)
    num_bytes: int = Field(ge=0)
    shards: tuple[ShardDigest, ...]
    row_root: str = Field(pattern=_HEX)
    salt_commitment: str = Field(pattern=_HEX)
    facts: SourceFacts = SourceFacts()

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what isn't said, so that manifests of sources without it have the bytes that they had."""
        fields: dict[str, Any] = dump(self)
        return {name: value for name, value in fields.items() if value or name not in ("grades", "also", "packed")}

    @property
    def class_name(self) -> str:
        """Name of its rows' class, joint where they belong to several."""
        return joint_name((self.class_path, *self.also))

    def to_bytes(self) -> bytes:
        """Return canonical JSON (RFC 8785): the file, and what is signed."""
        return rfc8785.dumps(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def told(self) -> dict[str, Any]:
        """What the index says of it."""
        measured = {"grades": self.grades, "also": list(self.also), "packed": packed_as_json(self.packed)}
        told = {"version": 1, "class": self.class_path, "band": self.band}
        return told | {name: value for name, value in measured.items() if value} | {"manifest_sha256": self.digest}

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = MANIFEST_FILE) -> SourceManifest:
        """Read a manifest.

        Raises:
            DataError: it isn't one, or isn't written canonically.
        """
        try:
            found = cls.model_validate_json(data)
        except ValidationError as error:
            raise DataError(
                f"{name} isn't a source manifest: {error.errors()[0]['msg']} in {error.errors()[0]['loc']}."
            ) from error
        # What `to_bytes` writes, at a fifth of its time: there may be 100,000 shards. Keys are ASCII and no value is a
        # float, so that Python's order of keys and its escapes are RFC 8785's.
        fields = found.model_dump(mode="json")
        if json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() != data:
            raise DataError(f"{name} isn't canonical JSON, so its digest isn't its content's. Write the source again.")
        return found


def packed_said(url: str, own: Any) -> tuple[tuple[str, SourceKind], ...]:  # noqa: ANN401  (as JSON has it)
    """Return class and kind of the rows that each class id in packs means, as an index says.

    Raises:
        DataError: it says something else.
    """
    found = own.get("packed", []) if isinstance(own, dict) else []
    try:
        listed = [PackedRows.model_validate_json(json.dumps(one)) for one in found]
    except (ValidationError, TypeError) as error:
        msg = f"{url} says that class ids in packs mean {found!r:.80}, and that's no list of classes. Write it again."
        raise DataError(msg) from error
    return tuple((one.class_path, one.kind) for one in listed)


def packed_as_json(packed: Sequence[PackedRows]) -> list[dict[str, Any]]:
    """Return what class ids in packs mean, as an index and a journal have it."""
    return [one.model_dump(mode="json") for one in packed]


def check_class(class_path: str) -> None:
    """Refuse what is no class path.

    Raises:
        DataError: it isn't one.
    """
    if not re.fullmatch(_CLASS_PATH, class_path):
        raise DataError(f"{class_path!r} is no class path. Use lower case, digits and -, such as open/permissive.")


def row_leaf(salt: bytes, row: int, sample_sha256: bytes) -> bytes:
    """Return the leaf of a row.

    Args:
        salt: 32 bytes of the source.
        row: its number in the source.
        sample_sha256: SHA-256 of the row as it's encoded.
    """
    return leaf_hash(hmac.digest(salt, row.to_bytes(8, "big"), "sha256") + sample_sha256)


def read_or_make_salt(directory: Path, salt: bytes | None = None) -> bytes:
    """Return a source's salt, drawn and kept (mode 0600) if there is none yet.

    Raises:
        DataError: there is another one already.
    """
    path = directory / SALT_FILE
    is_kept = path.exists()
    if is_kept:
        found = path.read_bytes()
        if salt is not None and found != salt:
            raise DataError(f"{path} holds another salt than the one given. Remove one of them.")
    else:
        found = secrets.token_bytes(32) if salt is None else salt
    if len(found) != 32:
        raise DataError(f"A salt has 32 bytes, and that of {path} has {len(found)}. Give 32, or restore the file.")
    if not is_kept:
        create_secret(path, found)
    return found
