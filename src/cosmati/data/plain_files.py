"""Files that are no rows (a tokenizer, base weights) with a manifest, so that they can be signed as data are.

describe_files("tokenizer", class_path="prepared/tokenizers", source="bpe", version="1")
$ cosmati data sign tokenizer --authority authority
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from cosmati.data.shards.manifest import (
    MANIFEST_FILE,
    SALT_FILE,
    ShardDigest,
    SourceFacts,
    SourceManifest,
    read_or_make_salt,
    row_leaf,
)
from cosmati.data.vouching import AskedAuthority, VouchedShards, Vouches, vouched_manifest
from cosmati.errors import DataError
from cosmati.storage.atomic import replace_file
from cosmati.storage.merkle import MerkleTree


class TamperedFileError(DataError):
    """A file isn't what a signed manifest says."""


def describe_files(
    folder: str | Path, *, class_path: str, source: str, version: str, facts: SourceFacts | None = None
) -> SourceManifest:
    """Write the manifest of a folder's files: each counts as a shard of one row.

    Args:
        folder: with at least one file.
        class_path: under which they'll be signed.
        source: their name.
        version: of their content.
        facts: where they're from.

    Raises:
        DataError: there's no file, or the folder has another manifest already.
    """
    folder = Path(folder)
    files = digests_of_files(folder)
    salt = read_or_make_salt(folder)
    tree = MerkleTree()
    for number, digest in enumerate(files.values()):
        tree.append(row_leaf(salt, number, bytes.fromhex(digest)))
    manifest = SourceManifest(
        source=source,
        source_version=version,
        class_path=class_path,
        num_rows=len(files),
        num_bytes=sum((folder / name).stat().st_size for name in files),
        shards=tuple(ShardDigest(name=name, sha256=digest, rows=1) for name, digest in files.items()),
        row_root=tree.root().hex(),
        salt_commitment=hashlib.sha256(salt).hexdigest(),
        facts=facts or SourceFacts(),
    )
    path = folder / MANIFEST_FILE
    if path.exists() and path.read_bytes() != manifest.to_bytes():
        msg = (
            f"{path} is there already and says otherwise. Write changed files into a folder of their own, or remove "
            "the manifest to have them signed anew."
        )
        raise DataError(msg)
    replace_file(path, manifest.to_bytes())
    return manifest


def digests_of_files(folder: Path) -> Mapping[str, str]:
    """Return the SHA-256 in hex of each file below a folder, by its name; without manifest and salt.

    Raises:
        DataError: there's no file.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    names = {path.relative_to(folder).as_posix(): path for path in found}
    files = {name: path for name, path in names.items() if name not in (MANIFEST_FILE, SALT_FILE)}
    if not files:
        raise DataError(f"{folder} holds no file. Give the folder that the files lie in.")
    return {name: file_sha256(path) for name, path in files.items()}


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def vouched_files(folder: Path, authority: Vouches) -> VouchedShards:
    """Return a folder's files as a source that is vouched for, after comparing each with what was signed.

    Raises:
        ProvenanceError: nobody who may has signed the manifest.
        TamperedFileError: a file is another, is missing, or was added.
        DataError: there's no manifest, or the licence has ended.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        msg = (
            f"{folder} has no {MANIFEST_FILE}, so nobody can have signed its files. Write it by describe_files(), and "
            "have it signed (`cosmati data sign`); or leave authority= out."
        )
        raise DataError(msg)
    manifest = SourceManifest.from_bytes(path.read_bytes(), name=str(path))
    vouched = vouched_manifest(AskedAuthority(authority), str(folder), manifest)
    here, signed = digests_of_files(folder), {one.name: one.sha256 for one in manifest.shards}
    for name in sorted({*here, *signed}):
        if here.get(name) != signed.get(name):
            what = (
                "is missing" if name not in here else "wasn't signed" if name not in signed else "isn't what was signed"
            )
            raise TamperedFileError(f"{folder / name} {what}. Restore the folder, or have it signed anew.")
    return vouched
