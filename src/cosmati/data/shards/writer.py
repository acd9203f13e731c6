"""Writes rows of one class into shards. A write that dies goes on where it was, to the same bytes.

    write(row) -> encoded -> a shard's worth -> file, fsync, rename -> journal -> ... -> finish: manifest, then index

Until `index.json` is there, nobody reads the source; it's put in place last, whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from cosmati.data.shards.cache import ShardCache, ShardFiles, hash_of
from cosmati.data.shards.compression import compress, extension
from cosmati.data.shards.encodings import encoding
from cosmati.data.shards.index import (
    Column,
    FileInfo,
    ShardInfo,
    dump_index,
    parse_index,
    shard_from_json,
    shard_to_json,
)
from cosmati.data.shards.manifest import (
    MANIFEST_FILE,
    ShardDigest,
    SourceFacts,
    SourceManifest,
    read_or_make_salt,
    row_leaf,
)
from cosmati.data.shards.mds import MdsShard, encode_sample, encode_shard
from cosmati.errors import DataError
from cosmati.storage.atomic import replace_file
from cosmati.storage.lock import FileLock
from cosmati.storage.merkle import MerkleTree

JOURNAL_FILE = "writer.jsonl"
_HEAD_BYTES = 1 << 12


class ShardWriter:
    """Writes one source.

    Args:
        out: its directory. What a broken write of the same source left there is gone on from, and a finished one is
            appended to: its index stays as it was until the new one is in place.
        columns: encodings of the columns by name, in order.
        class_path: class of all rows, such as `open/permissive`.
        band: quality band of all rows; each band is a source of its own.
        source: name of the source.
        source_version: of its content.
        size_limit: bytes of an uncompressed shard at most, under 4 GiB; a longer row has a shard of its own.
        compression: of shards, `zstd:3` for one; None leaves them as they're read.
        hashes: of files, by name; SHA-256 is always among them.
        facts: where the data come from.
        salt: 32 bytes for the rows' leaves; drawn if None.

    Raises:
        DataError: the directory holds another source, or another process writes it.

    Example:
        >>> with ShardWriter("out", {"text": "str"}, class_path="open/permissive", source="notes") as writer:
        ...     for row in rows[writer.num_written:]:
        ...         writer.write(row)
    """

    def __init__(
        self,
        out: Path | str,
        columns: Mapping[str, str],
        *,
        class_path: str,
        source: str,
        source_version: str = "1",
        band: int = 0,
        size_limit: int = 1 << 26,
        compression: str | None = None,
        hashes: Sequence[str] = ("sha256",),
        facts: SourceFacts | None = None,
        salt: bytes | None = None,
    ) -> None:
        if not 0 < size_limit < 1 << 32:
            raise DataError(f"size_limit={size_limit}: give 1 byte or more, and less than 4 GiB.")
        self.out = Path(out)
        self.columns = tuple(
            Column(name, kind, encoding(kind, allow_pickle=True).size) for name, kind in columns.items()
        )
        if not self.columns:
            raise DataError("A row needs a column. Give columns={'text': 'str'}, say.")
        extension(compression)
        self._facts = {
            "class_path": class_path,
            "band": band,
            "source": source,
            "source_version": source_version,
            "size_limit": size_limit,
            "compression": compression,
            "hashes": sorted({*hashes, "sha256"}),
            "columns": [[c.name, c.encoding] for c in self.columns],
        }
        self._told = facts or SourceFacts()
        self._check_class(class_path)
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(self.out / JOURNAL_FILE)
        except BlockingIOError as error:
            raise DataError(
                f"{self.out} is being written by another process. Wait for it, or write elsewhere."
            ) from error
        self._journal: IO[str] = (self.out / JOURNAL_FILE).open("a+")
        try:
            self._take_over(salt)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _check_class(class_path: str) -> None:
        parts = class_path.split("/")
        if not all(part and set(part) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for part in parts):
            raise DataError(f"{class_path!r} is no class path. Use lower case, digits and -, such as open/permissive.")

    def _take_over(self, salt: bytes | None) -> None:
        """Read what an earlier write left, and cut off what it didn't finish."""
        self._salt = read_or_make_salt(self.out, salt)
        self._shards: list[ShardInfo] = []
        self._digests: list[ShardDigest] = []
        self._tree = MerkleTree()
        self._journal.seek(0)
        lines = self._journal.read().splitlines(keepends=True)
        end = 0
        for number, line in enumerate(lines):
            entry = self._entry(line)
            if entry is None:
                break
            if not number:
                if entry != self._facts:
                    changed = sorted(key for key in self._facts if entry.get(key) != self._facts[key])
                    msg = f"{self.out} was begun with another {', '.join(changed)}. Use the same, or another directory."
                    raise DataError(msg)
            else:
                info = shard_from_json(entry["shard"])
                self._shards.append(info)
                self._digests.append(ShardDigest.model_validate_json(json.dumps(entry["digest"])))
                self._tree = MerkleTree([(size, bytes.fromhex(digest)) for size, digest in entry["edge"]])
            end += len(line.encode())
        self._journal.truncate(end)
        if not end:
            self._note(self._facts)
        self.num_written = sum(shard.num_rows for shard in self._shards)
        self._rows: list[bytes] = []
        self._num_bytes = 0

    @staticmethod
    def _entry(line: str) -> dict[str, Any] | None:
        """Return a line's content; None where it was cut off."""
        digest, _, text = line.rstrip("\n").partition(" ")
        if not line.endswith("\n") or hashlib.sha256(text.encode()).hexdigest()[:16] != digest:
            return None
        content: dict[str, Any] = json.loads(text)
        return content

    def _note(self, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry, sort_keys=True)
        self._journal.write(f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {text}\n")
        self._journal.flush()

    def write(self, row: Mapping[str, Any]) -> int:
        """Write a row; return its number in the source.

        Raises:
            DataError: the row doesn't have the columns, or a value isn't of its encoding; nothing of it is written.
        """
        sample = encode_sample(self.columns, row)
        size = len(sample) + 4
        limit = int(str(self._facts["size_limit"]))
        if self._rows and self._num_bytes + size + _HEAD_BYTES > limit:
            self._flush()
        number = self.num_written
        self._tree.append(row_leaf(self._salt, number, hashlib.sha256(sample).digest()))
        self._rows.append(sample)
        self._num_bytes += size
        self.num_written += 1
        return number

    def _flush(self) -> None:
        """Put a shard in place, then note it: a shard without a note is written again."""
        if not self._rows:
            return
        raw = encode_shard(self.columns, self._rows, size_limit=int(str(self._facts["size_limit"])))
        name = f"shard.{len(self._shards):05d}.mds"
        compression = self._facts["compression"]
        packed = None if compression is None else compress(str(compression), raw)
        info = ShardInfo(
            num_rows=len(self._rows),
            columns=self.columns,
            raw=self._file(name, raw),
            zip=None if packed is None else self._file(name + extension(str(compression)), packed),
            compression=None if compression is None else str(compression),
            size_limit=int(str(self._facts["size_limit"])),
        )
        digest = ShardDigest(name=name, sha256=hashlib.sha256(raw).hexdigest(), rows=len(self._rows))
        self._keep(info.zip.basename if info.zip else name, raw if packed is None else packed)
        self._shards.append(info)
        self._digests.append(digest)
        edge = [[size, value.hex()] for size, value in self._tree.edge]
        self._note({"shard": shard_to_json(info), "digest": digest.model_dump(), "edge": edge})
        self._rows, self._num_bytes = [], 0

    def _keep(self, name: str, data: bytes) -> None:
        try:
            replace_file(self.out / name, data)
        except OSError as error:
            msg = (
                f"{self.out / name} can't be written: {error.strerror}. The shards before it are whole: make room, "
                "open the writer again with the same arguments, and go on with row number `num_written`."
            )
            raise DataError(msg) from error

    def _file(self, name: str, data: bytes) -> FileInfo:
        hashes = self._facts["hashes"]
        assert isinstance(hashes, list), "set in __init__"
        return FileInfo(name, len(data), {kind: hash_of(kind, data) for kind in hashes})

    def finish(self) -> SourceManifest:
        """Write the last shard, the manifest and the index; return the manifest."""
        self._flush()
        manifest = SourceManifest(
            source=str(self._facts["source"]),
            source_version=str(self._facts["source_version"]),
            class_path=str(self._facts["class_path"]),
            band=int(str(self._facts["band"])),
            num_rows=self.num_written,
            num_bytes=sum(shard.raw.num_bytes for shard in self._shards),
            shards=tuple(self._digests),
            row_root=self._tree.root().hex(),
            salt_commitment=hashlib.sha256(self._salt).hexdigest(),
            facts=self._told,
        )
        _finish(self.out, self._shards, manifest)
        return manifest

    def close(self) -> None:
        """Let go of the directory; what is in no finished shard yet has to be written again."""
        self._journal.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish, unless something went wrong."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()


def write_dataset(
    rows: Iterable[Mapping[str, Any]],
    out: Path | str,
    columns: Mapping[str, str],
    *,
    class_of: Callable[[Mapping[str, Any]], str] | str,
    source: str,
    facts: SourceFacts | None = None,
    **options: Any,  # noqa: ANN401  (ShardWriter's own)
) -> list[SourceManifest]:
    """Write rows of several classes: a source for each class, and `sources.json`, which names them.

    After a crash, call it again with the same rows: finished shards are kept, and their rows passed over.

    Args:
        rows: in any order.
        out: directory of the data set.
        columns: encodings of the columns by name.
        class_of: class path of a row, or of all.
        source: name of the sources.
        facts: where the data come from.
        options: of `ShardWriter`.
    """
    folder = Path(out)
    writers: dict[str, ShardWriter] = {}
    seen: dict[str, int] = {}
    try:
        for row in rows:
            path = class_of if isinstance(class_of, str) else class_of(row)
            if path not in writers:
                writers[path] = ShardWriter(
                    folder / path, columns, class_path=path, source=source, facts=facts, **options
                )
                seen[path] = 0
            if seen[path] >= writers[path].num_written:
                writers[path].write(row)
            seen[path] += 1
        if not writers:
            raise DataError("There is no row to write.")
        manifests = [writers[path].finish() for path in sorted(writers)]
    finally:
        for writer in writers.values():
            writer.close()
    write_sources(folder, sorted(writers))
    return manifests


def write_sources(folder: Path, class_paths: Sequence[str]) -> None:
    """Write `sources.json` over sources that lie in directories named like their classes."""
    entries = [
        {
            "path": path,
            "class": path,
            "index_sha256": hashlib.sha256((folder / path / "index.json").read_bytes()).hexdigest(),
        }
        for path in class_paths
    ]
    replace_file(folder / "sources.json", json.dumps({"version": 1, "sources": entries}, indent=1).encode())


def merge_sources(parts: Sequence[Path | str], out: Path | str, *, salt: bytes | None = None) -> SourceManifest:
    """Make one source of several that were written in parallel, without copying a shard.

    Args:
        parts: sources in directories below `out`, in the order in which their rows are to be numbered.
        out: directory of the merged source.
        salt: 32 bytes for the rows' leaves; drawn if None.

    Raises:
        DataError: a part lies elsewhere, isn't finished, or has other columns, or another class or source.
    """
    folder = Path(out)
    manifests: list[SourceManifest] = []
    shards: list[ShardInfo] = []
    digests: list[ShardDigest] = []
    tree = MerkleTree()
    salt = read_or_make_salt(folder, salt)
    for part in map(Path, parts):
        if not part.resolve().is_relative_to(folder.resolve()) or not (part / "index.json").exists():
            raise DataError(f"{part} isn't a finished source below {folder}. Write the parts there first.")
        below = part.resolve().relative_to(folder.resolve()).as_posix()
        manifests.append(SourceManifest.from_bytes((part / MANIFEST_FILE).read_bytes()))
        index = parse_index((part / "index.json").read_bytes(), name=f"{part}/index.json")
        store = ShardCache(part, None)
        for number, digest in zip(range(index.num_shards), manifests[-1].shards, strict=True):
            info = index.shard(number)
            shard = MdsShard(store.open(ShardFiles(info.raw, info.zip, info.compression)), info, allow_pickle=True)
            first = sum(one.rows for one in digests)
            for row in range(shard.num_rows):
                tree.append(row_leaf(salt, first + row, hashlib.sha256(shard.sample(row)).digest()))
            shards.append(_moved(info, below))
            digests.append(digest.model_copy(update={"name": f"{below}/{digest.name}"}))
    one = manifests[0]
    kinds = {(m.class_path, m.band, m.source, m.source_version, m.facts.model_dump_json()) for m in manifests}
    if len(kinds) != 1 or len({shard.columns for shard in shards}) > 1:
        raise DataError("The parts differ in class, source, facts or columns. Write them with the same arguments.")
    merged = one.model_copy(
        update={
            "num_rows": sum(m.num_rows for m in manifests),
            "num_bytes": sum(m.num_bytes for m in manifests),
            "shards": tuple(digests),
            "row_root": tree.root().hex(),
            "salt_commitment": hashlib.sha256(salt).hexdigest(),
        }
    )
    _finish(folder, shards, merged)
    return merged


def _moved(info: ShardInfo, below: str) -> ShardInfo:
    def moved(file: FileInfo) -> FileInfo:
        return dataclasses.replace(file, basename=f"{below}/{file.basename}")

    return dataclasses.replace(info, raw=moved(info.raw), zip=None if info.zip is None else moved(info.zip))


def _finish(folder: Path, shards: Sequence[ShardInfo], manifest: SourceManifest) -> None:
    """Put manifest and index in place, the index last."""
    told = {"version": 1, "class": manifest.class_path, "band": manifest.band, "manifest_sha256": manifest.digest}
    extra = {"cosmati": told}
    replace_file(folder / MANIFEST_FILE, manifest.to_bytes())
    replace_file(folder / "index.json", dump_index(shards, extra))
