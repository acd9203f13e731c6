"""Computes a source anew from its shards, and compares it with what its index and its manifest say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmati.data.shards.cache import ShardCache
from cosmati.data.shards.formats import files_of, open_shard
from cosmati.data.shards.index import ShardIndex, ShardInfo, parse_index
from cosmati.data.shards.journal import first_entry
from cosmati.data.shards.manifest import MANIFEST_FILE, SALT_FILE, ShardDigest, SourceManifest, row_leaf
from cosmati.data.shards.parquet import ParquetIndex, parquet_index
from cosmati.data.shards.remote import Remote
from cosmati.data.shards.sources import listed_sources
from cosmati.data.shards.writer import JOURNAL_FILE
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
    url: str | Path,
    *,
    cache: str | Path | None = None,
    keep: str | Path | None = None,
    on_shard: Callable[[int, int], None] = lambda _done, _all: None,
) -> Verification:
    """Read every row of a source, and compare hashes, counts, and the rows' Merkle root where the salt is there.

    Args:
        url: directory of the source.
        cache: where fetched shards are kept; needed for a remote.
        keep: directory where the salt of a remote source lies.
        on_shard: told of progress: shards done, and shards of all.
    """
    url, cache = str(url), None if cache is None else Path(cache).expanduser()
    remote = Remote(url)
    if remote.local is None and cache is None:
        raise DataError(f"{url} is remote: say where to keep what is fetched.")
    index = _index(remote)
    own = index.extra.get("cosmati")
    own = own if isinstance(own, dict) else {}
    store = ShardCache(cache or remote.local or Path(), remote if cache else None)
    salt = _salt(remote.local if keep is None else Path(keep))
    tree = MerkleTree()
    digests: list[ShardDigest] = []
    problems: list[str] = []
    for number in range(index.num_shards):
        try:
            digests.append(_digest(store, index.shard(number), tree, salt, sum(one.rows for one in digests)))
        except DataError as error:
            problems.append(str(error))
        on_shard(number + 1, index.num_shards)
    num_rows, class_path = sum(one.rows for one in digests), str(own.get("class", "unknown"))
    if not remote.exists(MANIFEST_FILE):
        missing = "there is no manifest.json, so origin and licence are unknown"
        return Verification(url, class_path, num_rows, tuple(problems), (missing,))
    try:
        manifest = SourceManifest.from_bytes(remote.read(MANIFEST_FILE, max_bytes=MAX_INDEX_BYTES))
    except DataError as error:
        return Verification(url, class_path, num_rows, (*problems, str(error)), ())
    is_whole = not problems
    problems += _against_journal(remote.local if keep is None else Path(keep), manifest, index)
    problems += _differences(manifest, digests if isinstance(index, ShardIndex) else None, num_rows, own)
    unchecked: tuple[str, ...] = ()
    if salt is None:
        what = "the rows against their Merkle root, since the salt isn't here: whoever changed a row and every file's"
        unchecked = (f"{what} hash would go unseen. Give the directory that holds salt.key (keep=, --keep)",)
    elif hashlib.sha256(salt).hexdigest() != manifest.salt_commitment:
        problems.append("salt.key isn't the salt that the manifest commits to, so the rows' root can't be computed")
    elif is_whole and tree.root().hex() != manifest.row_root:
        problems.append("the rows' Merkle root isn't the manifest's: rows were changed, added, removed or moved")
    return Verification(url, manifest.class_path, num_rows, tuple(problems), unchecked)


def _index(remote: Remote) -> ShardIndex | ParquetIndex:
    found = None if remote.exists("index.json") else parquet_index(remote)
    if found is not None:
        return found
    return parse_index(remote.read("index.json", max_bytes=MAX_INDEX_BYTES), name=f"{remote.url}/index.json")


def _salt(folder: Path | None) -> bytes | None:
    path = None if folder is None else folder / SALT_FILE
    return path.read_bytes() if path is not None and path.exists() else None


def _digest(store: ShardCache, info: ShardInfo, tree: MerkleTree, salt: bytes | None, first_row: int) -> ShardDigest:
    shard = open_shard(store, info, allow_pickle=True)
    for row in range(shard.num_rows):
        sample = shard.sample(row)
        if salt is not None:
            tree.append(row_leaf(salt, first_row + row, hashlib.sha256(sample).digest()))
    with store.open(files_of(info)[0]).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ShardDigest(name=info.raw.basename, sha256=digest, rows=shard.num_rows)


def _differences(
    manifest: SourceManifest, digests: list[ShardDigest] | None, num_rows: int, own: dict[str, object]
) -> Iterator[str]:
    """Say where index and shards aren't what the manifest says; of Parquet it doesn't know the files."""
    claimed = {shard.name: shard for shard in manifest.shards} if digests is not None else {}
    found = {shard.name: shard for shard in digests or ()}
    if manifest.shards[: len(digests or ())] == tuple(digests or ()) and 0 < len(found) < len(claimed):
        left = manifest.num_rows - num_rows
        yield (
            f"the manifest has {left} rows more than the index, which an append leaves that is broken off in its last "
            "moment: open the writer with append=True, and finish it"
        )
        return
    for name in sorted(claimed.keys() | found.keys()):
        if name not in claimed:
            yield f"shard {name} isn't in the manifest"
        elif name not in found:
            yield f"shard {name} is in the manifest, and can't be read or isn't in the index"
        elif claimed[name] != found[name]:
            yield f"shard {name} isn't what the manifest says"
    if num_rows != manifest.num_rows:
        yield f"there are {num_rows} rows, and the manifest says {manifest.num_rows}"
    if own.get("class") != manifest.class_path:
        yield f"the index says class {own.get('class')}, and the manifest {manifest.class_path}"
    if own.get("band", 0) != manifest.band:
        yield f"the index says band {own.get('band')}, and the manifest {manifest.band}"
    if own.get("grades", {}) != manifest.grades:
        yield f"the index says grades {own.get('grades')}, and the manifest {manifest.grades}"
    if own.get("manifest_sha256") != manifest.digest:
        yield "the index names another manifest"


def _against_journal(folder: Path | None, manifest: SourceManifest, index: ShardIndex | ParquetIndex) -> Iterator[str]:
    """Say where manifest and index aren't what the writer's journal says, where it's here."""
    entry = None if folder is None else first_entry(folder / JOURNAL_FILE)
    if entry is None:
        return
    if entry["class_path"] != manifest.class_path:
        yield f"it was written as class {entry['class_path']}, and the manifest says {manifest.class_path}"
    facts, noted = manifest.facts.model_dump(mode="json"), entry["facts"]
    for name in sorted(noted.keys() | facts.keys()):
        if noted.get(name) != facts.get(name):
            yield f"it was written with {name} {noted.get(name)!r}, and the manifest says {facts.get(name)!r}"
    for number in range(index.num_shards):
        shard = index.shard(number)
        columns = [[column.name, column.encoding] for column in shard.columns]
        if columns != entry["columns"]:
            yield f"it was written with the columns {entry['columns']}, and the index says {columns} of shard {number}"
            return


def _unlisted(remote: Remote, listed: Iterable[str]) -> Iterator[str]:
    """Yield finished sources below a local data set that `sources.json` doesn't name."""
    for journal in sorted(remote.local.rglob(JOURNAL_FILE)) if remote.local is not None else ():
        path = journal.parent.relative_to(remote.local or Path()).as_posix()
        if path != "." and path not in listed and (journal.parent / "index.json").exists():
            yield path


def source_urls(url: str) -> list[str]:
    """Return the sources of a data set, or the source itself."""
    listed = listed_sources(Remote(url))
    return [url] if listed is None else [f"{url.rstrip('/')}/{entry['path']}" for entry in listed]


def verify_list(url: str) -> list[str]:
    """Compare `sources.json` with the indices that it names; return what doesn't hold, a line each."""
    remote = Remote(url)
    listed = listed_sources(remote)
    problems = (
        []
        if listed is None
        else [
            f"{path} was written, and sources.json doesn't name it"
            for path in _unlisted(remote, {entry["path"] for entry in listed})
        ]
    )
    for entry in listed or ():
        name = f"{entry['path']}/index.json"
        if not remote.exists(name):
            problems.append(f"sources.json names {entry['path']}, and there is no {name}")
            continue
        content = remote.read(name, max_bytes=MAX_INDEX_BYTES)
        own = parse_index(content, name=name).extra.get("cosmati")
        says = own.get("class") if isinstance(own, dict) else None
        if hashlib.sha256(content).hexdigest() != entry["index_sha256"]:
            problems.append(f"{name} isn't the one that sources.json names")
        if says not in (None, entry["class"]):
            problems.append(f"sources.json says class {entry['class']} of {entry['path']}, and its index {says}")
    return problems
