"""Computes a source anew from its shards, and compares it with what its index and its manifest say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmati.data.shards.cache import ShardCache, ShardFiles
from cosmati.data.shards.index import ShardInfo, parse_index
from cosmati.data.shards.manifest import MANIFEST_FILE, SALT_FILE, ShardDigest, SourceManifest, row_leaf
from cosmati.data.shards.mds import MdsShard
from cosmati.data.shards.remote import Remote
from cosmati.errors import DataError
from cosmati.storage.merkle import MerkleTree

MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True)
class Verification:
    """What was found of a source.

    Attributes:
        source: its URL.
        class_path: class of its rows, as the manifest or the index says.
        num_rows: rows that were read.
        problems: what doesn't hold, a line each.
        unchecked: what couldn't be checked, and why.
    """

    source: str
    class_path: str
    num_rows: int
    problems: tuple[str, ...]
    unchecked: tuple[str, ...]


def verify_source(
    url: str | Path, *, cache: str | Path | None = None, on_shard: Callable[[int, int], None] = lambda _done, _all: None
) -> Verification:
    """Read every row of a source, and compare hashes, counts, and the rows' Merkle root where the salt is there.

    Args:
        url: directory of the source.
        cache: where fetched shards are kept; needed for a remote.
        on_shard: told of progress: shards done, and shards of all.
    """
    url, cache = str(url), None if cache is None else Path(cache)
    remote = Remote(url)
    if remote.local is None and cache is None:
        raise DataError(f"{url} is remote: say where to keep what is fetched.")
    index = parse_index(remote.read("index.json", max_bytes=MAX_INDEX_BYTES), name=f"{url}/index.json")
    own = index.extra.get("cosmati")
    own = own if isinstance(own, dict) else {}
    store = ShardCache(cache or remote.local or Path(), remote if cache else None)
    salt = _salt(remote)
    tree = MerkleTree()
    digests: list[ShardDigest] = []
    problems: list[str] = []
    for number in range(index.num_shards):
        info = index.shard(number)
        try:
            digests.append(_digest(store, info, tree, salt, sum(one.rows for one in digests)))
        except DataError as error:
            problems.append(str(error))
        on_shard(number + 1, index.num_shards)
    num_rows = sum(one.rows for one in digests)
    if not remote.exists(MANIFEST_FILE):
        missing = "there is no manifest.json, so origin and licence are unknown"
        return Verification(url, str(own.get("class", "unknown")), num_rows, tuple(problems), (missing,))
    try:
        manifest = SourceManifest.from_bytes(remote.read(MANIFEST_FILE, max_bytes=MAX_INDEX_BYTES))
    except DataError as error:
        return Verification(url, str(own.get("class", "unknown")), num_rows, (*problems, str(error)), ())
    problems += _differences(manifest, digests, own)
    if salt is None:
        unchecked = ("the salt isn't here, so the rows' root wasn't computed",)
        return Verification(url, manifest.class_path, num_rows, tuple(problems), unchecked)
    if not problems and tree.root().hex() != manifest.row_root:
        problems.append("the rows' Merkle root isn't the manifest's")
    return Verification(url, manifest.class_path, num_rows, tuple(problems), ())


def _salt(remote: Remote) -> bytes | None:
    return remote.read(SALT_FILE, max_bytes=64) if remote.local is not None and remote.exists(SALT_FILE) else None


def _digest(store: ShardCache, info: ShardInfo, tree: MerkleTree, salt: bytes | None, first_row: int) -> ShardDigest:
    path = store.open(ShardFiles(info.raw, info.zip, info.compression))
    shard = MdsShard(path, info, allow_pickle=True)
    for row in range(shard.num_rows):
        sample = shard.sample(row)
        if salt is not None:
            tree.append(row_leaf(salt, first_row + row, hashlib.sha256(sample).digest()))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ShardDigest(name=info.raw.basename, sha256=digest, rows=shard.num_rows)


def _differences(manifest: SourceManifest, digests: list[ShardDigest], own: dict[str, object]) -> Iterator[str]:
    claimed = {shard.name: shard for shard in manifest.shards}
    found = {shard.name: shard for shard in digests}
    for name in sorted(claimed.keys() | found.keys()):
        if name not in claimed:
            yield f"shard {name} isn't in the manifest"
        elif name not in found:
            yield f"shard {name} is in the manifest, and can't be read or isn't in the index"
        elif claimed[name] != found[name]:
            yield f"shard {name} isn't what the manifest says"
    if own.get("class") != manifest.class_path:
        yield f"the index says class {own.get('class')}, and the manifest {manifest.class_path}"
    if own.get("band", 0) != manifest.band:
        yield f"the index says band {own.get('band')}, and the manifest {manifest.band}"
    if own.get("manifest_sha256") != manifest.digest:
        yield "the index names another manifest"


def source_urls(url: str) -> list[str]:
    """Return the sources of a data set, or the source itself."""
    import json

    remote = Remote(url)
    if not remote.exists("sources.json"):
        return [url]
    entries = json.loads(remote.read("sources.json", max_bytes=1 << 26))["sources"]
    return [f"{url.rstrip('/')}/{entry['path']}" for entry in entries]
