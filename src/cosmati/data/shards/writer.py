"""Writes rows of one class into shards. A write that dies goes on where it was, to the same bytes.

    write(row) -> encoded -> a shard's worth -> file, fsync, rename -> journal -> ... -> finish: manifest, then index

Until `index.json` is there, nobody reads the source; it's put in place last, whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cosmati.data.graded import SourceKind, kind_of
from cosmati.data.shards.cache import ShardCache, ShardFiles, hash_of
from cosmati.data.shards.commitment import differences
from cosmati.data.shards.compression import compress, extension
from cosmati.data.shards.index import FileInfo, ShardInfo, dump_index, parse_index, shard_from_json, shard_to_json
from cosmati.data.shards.journal import Journal
from cosmati.data.shards.manifest import (
    MANIFEST_FILE,
    PackedRows,
    ShardDigest,
    SourceFacts,
    SourceManifest,
    check_class,
    packed_as_json,
    read_or_make_salt,
    row_leaf,
)
from cosmati.data.shards.mds import MdsShard, check_size_limit, columns_of, encode_sample, encode_shard
from cosmati.data.shards.upload import Destination, Target
from cosmati.errors import DataError
from cosmati.storage.merkle import MerkleTree

JOURNAL_FILE = "writer.jsonl"
_UNSAID: dict[str, object] = {"grades": {}, "also": [], "packed": []}
_HEAD_BYTES = 1 << 12
_MAX_INDEX_BYTES = 1 << 30


class ShardWriter:
    """Writes one source.

    Args:
        out: its directory, or a `Destination` that may be remote; what a broken write left there is gone on from.
        columns: encodings of the columns by name, in order.
        class_path: class of all rows, such as `open/permissive`.
        band: quality band of all rows; each band is a source of its own.
        grades: what else was measured of all rows, by measure: `{"evidence": "trial"}`; likewise.
        also: other classes to which all rows belong, too.
        packed: of packs of several classes, what each class id in their spans means: class and kind of the rows.
        source: name of the source.
        source_version: of its content.
        size_limit: bytes of an uncompressed shard at most, under 4 GiB; a longer row has a shard of its own.
        compression: of shards, `zstd:3` for one; None leaves them as they're read.
        hashes: of files, by name; SHA-256 is always among them.
        facts: where the data come from. A source keeps those that it was begun with.
        salt: 32 bytes for the rows' leaves; drawn if None.
        commitment: digest of what the rows are read from, if they're all written again, from the first: then
            `num_written` begins at 0, and a finished shard is compared with what its rows give now.
        append: add rows to the source if it's finished: its index stays as it was until the new one is in place.

    Raises:
        DataError: the directory holds another source, a finished one without `append`, or one that's being written.

    Example:
        >>> with ShardWriter("out", {"text": "str"}, class_path="open/permissive", source="notes") as writer:
        ...     for row in rows[writer.num_written:]:
        ...         writer.write(row)
    """

    def __init__(  # noqa: PLR0913  (a source's settings)
        self,
        out: Path | str | Destination,
        columns: Mapping[str, str],
        *,
        class_path: str,
        source: str,
        source_version: str = "1",
        band: int = 0,
        grades: Mapping[str, str] | None = None,
        also: Sequence[str] = (),
        packed: Sequence[tuple[str, SourceKind]] = (),
        size_limit: int = 1 << 26,
        compression: str | None = None,
        hashes: Sequence[str] = ("sha256",),
        facts: SourceFacts | None = None,
        salt: bytes | None = None,
        commitment: str | None = None,
        append: bool = False,
    ) -> None:
        check_size_limit(size_limit)
        self.columns = columns_of(columns)
        extension(compression)
        check_class(class_path)
        self._told, self._size_limit, self._compression = facts or SourceFacts(), size_limit, compression
        self._packed = tuple(PackedRows.of(*one) for one in packed)
        self._settings: dict[str, Any] = {
            "class_path": class_path,
            "band": band,
            "grades": dict(grades or {}),
            "also": sorted(also),
            "packed": packed_as_json(self._packed),
            "source": source,
            "source_version": source_version,
            "size_limit": size_limit,
            "compression": compression,
            "hashes": sorted({*hashes, "sha256"}),
            "columns": [[c.name, c.encoding] for c in self.columns],
            "facts": self._told.model_dump(mode="json"),
            "commitment": commitment,
        }
        place = out if isinstance(out, Destination) else Destination(str(out))
        self._target, self.out, self._journal = place.target, place.here, self._locked(place.here)
        try:
            self._take_over(salt, replay=commitment is not None)
            if commitment is None:
                self._refuse_finished(append=append)
        except BaseException:
            self.close()
            raise

    def _locked(self, out: Path) -> Journal:
        try:
            return Journal(out / JOURNAL_FILE)
        except BlockingIOError as error:
            msg = f"{out} is being written by another process. Wait for it, or write elsewhere."
            raise DataError(msg) from error

    def _take_over(self, salt: bytes | None, *, replay: bool) -> None:
        """Read what an earlier write left, and cut off what it didn't finish."""
        self._shards: list[ShardInfo] = []
        self._digests: list[ShardDigest] = []
        self._tree = MerkleTree()
        is_begun = False
        for entry in self._journal.entries():
            if is_begun:
                self._shards.append(shard_from_json(entry["shard"]))
                self._digests.append(ShardDigest.model_validate_json(json.dumps(entry["digest"])))
                self._tree = MerkleTree([(size, bytes.fromhex(digest)) for size, digest in entry["edge"]])
            else:
                self._compare(entry)
            is_begun = True
        if not is_begun:
            if self._target.exists("index.json"):
                msg = (
                    f"{self._target.url} holds a source already, and {self.out} no journal of its writing, which says "
                    "whose its rows are. Write elsewhere, or give the directory that was kept."
                )
                raise DataError(msg)
            self._journal.note(self._settings)
        self._salt = read_or_make_salt(self.out, salt)
        self._noted = list(zip(self._shards, self._digests, strict=True)) if replay else []
        if replay:
            self._shards, self._digests, self._tree = [], [], MerkleTree()
        self.num_written = sum(shard.num_rows for shard in self._shards)
        self._rows: list[bytes] = []
        self._num_bytes = 0

    def _refuse_lost(self) -> None:
        """Refuse to go on behind shards that somebody removed: their rows aren't at hand."""
        wanted = {(shard.zip or shard.raw).basename for shard in self._shards}
        lost = sorted(wanted.difference(self._target.names("shard.*") if wanted else ()))
        if lost:
            raise DataError(
                f"{self._target.url} has no {lost[0]} any more, which was written there ({len(lost)} of {len(wanted)} "
                f"shards are gone). Put them back, or remove {JOURNAL_FILE} too and write all rows again."
            )

    def _refuse_finished(self, *, append: bool) -> None:
        """Refuse a source that is whole: a script that runs twice would write its rows twice."""
        self._refuse_lost()
        if append or not self._shards or not self._target.exists("index.json"):
            return
        index = parse_index(self._target.read("index.json", max_bytes=_MAX_INDEX_BYTES), name="index.json")
        broken = ", and an append to it was broken off" if index.num_rows != self.num_written else ""
        raise DataError(
            f"{self._target.url} is finished, with {index.num_rows} rows{broken}. Give append=True to add rows "
            "from number `num_written` on, or another directory."
        )

    def _compare(self, before: Mapping[str, Any]) -> None:
        """Refuse to go on with other settings than the source was begun with."""
        # An older journal doesn't speak of them.
        old, new = ({**_UNSAID, **one, **one.get("facts", {}), "facts": None} for one in (before, self._settings))
        found = differences(old, new)
        if found:
            raise DataError(f"{self.out} was begun otherwise: {'; '.join(found)}. Give the same, or another directory.")

    def write(self, row: Mapping[str, Any]) -> int:
        """Write a row; return its number in the source.

        Raises:
            DataError: the row doesn't have the columns, or a value isn't of its encoding; nothing of it is written.
        """
        self._journal.refuse_closed()
        sample = encode_sample(self.columns, row)
        size = len(sample) + 4
        if self._rows and self._num_bytes + size + _HEAD_BYTES > self._size_limit:
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
        raw = encode_shard(self.columns, self._rows, size_limit=self._size_limit)
        name = f"shard.{len(self._shards):05d}.mds"
        digest = ShardDigest(name=name, sha256=hashlib.sha256(raw).hexdigest(), rows=len(self._rows))
        if len(self._shards) < len(self._noted):
            info = self._noted_before(digest, raw)
        else:
            info = self._put(name, raw)
            edge = [[size, value.hex()] for size, value in self._tree.edge]
            self._journal.note({"shard": shard_to_json(info), "digest": digest.model_dump(), "edge": edge})
        # Only now: where one of them failed, all of it is done again.
        self._shards.append(info)
        self._digests.append(digest)
        self._rows, self._num_bytes = [], 0

    def _noted_before(self, digest: ShardDigest, raw: bytes) -> ShardInfo:
        info, noted = self._noted[len(self._shards)]
        if digest != noted:
            raise self._other_rows(f"{noted.name} would be another")
        # Somebody may have removed it meanwhile; its rows are at hand.
        return info if self._target.exists((info.zip or info.raw).basename) else self._put(digest.name, raw)

    def _other_rows(self, how: str) -> DataError:
        return DataError(
            f"These aren't the rows that {self._target.url} was begun with: {how}. Give the same rows to go on, say "
            "append and what they're read from, or replace the source."
        )

    def _put(self, name: str, raw: bytes) -> ShardInfo:
        packed = None if self._compression is None else compress(self._compression, raw)
        info = ShardInfo(
            num_rows=len(self._rows),
            columns=self.columns,
            raw=self._file(name, raw),
            zip=None if packed is None else self._file(name + extension(self._compression), packed),
            compression=self._compression,
            size_limit=self._size_limit,
        )
        file = (info.zip or info.raw).basename
        try:
            self._target.put(file, raw if packed is None else packed)
        except OSError as error:
            msg = (
                f"{self.out / file} can't be written: {error.strerror}. The shards before it are whole: make room, "
                "open the writer again with the same arguments, and go on with row number `num_written`."
            )
            raise DataError(msg) from error
        return info

    def _file(self, name: str, data: bytes) -> FileInfo:
        return FileInfo(name, len(data), {kind: hash_of(kind, data) for kind in self._settings["hashes"]})

    def finish(self) -> SourceManifest:
        """Write the last shard, the manifest and the index; return the manifest."""
        self._journal.refuse_closed()
        self._flush()
        if sum(digest.rows for digest in self._digests) != self.num_written or len(self._digests) != len(self._shards):
            raise DataError(f"A write to {self.out} was broken off. Open the writer again, and go on.")
        if len(self._shards) < len(self._noted):
            raise self._other_rows(f"they are {self.num_written} of {sum(noted.rows for _, noted in self._noted)}")
        manifest = SourceManifest(
            source=str(self._settings["source"]),
            source_version=str(self._settings["source_version"]),
            class_path=str(self._settings["class_path"]),
            band=int(str(self._settings["band"])),
            grades=self._settings["grades"],
            also=tuple(self._settings["also"]),
            packed=self._packed,
            num_rows=self.num_written,
            num_bytes=sum(shard.raw.num_bytes for shard in self._shards),
            shards=tuple(self._digests),
            row_root=self._tree.root().hex(),
            salt_commitment=hashlib.sha256(self._salt).hexdigest(),
            facts=self._told,
        )
        _finish(self._target, self._shards, manifest)
        return manifest

    def close(self) -> None:
        """Let go of the directory; what is in no finished shard yet has to be written again."""
        self._journal.close()

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


def merge_sources(parts: Sequence[Path | str], out: Path | str, *, salt: bytes | None = None) -> SourceManifest:
    """Make one source of several that were written in parallel, without copying a shard.

    Args:
        parts: sources in directories below `out`, in the order in which their rows are to be numbered.
        out: directory of the merged source.
        salt: 32 bytes for the rows' leaves; drawn if None.

    Raises:
        DataError: a part lies elsewhere, isn't finished, is given twice, or has another class, source or columns.
    """
    folder = Destination(str(out)).here.resolve()
    places = [Path(part).resolve() for part in parts]
    _check_parts(places, folder)
    manifests = [SourceManifest.from_bytes((part / MANIFEST_FILE).read_bytes()) for part in places]
    indices = [parse_index((part / "index.json").read_bytes(), name=f"{part}/index.json") for part in places]
    one = manifests[0]
    kinds = {
        (
            m.class_name,
            kind_of(m),
            json.dumps(packed_as_json(m.packed)),
            m.source,
            m.source_version,
            m.facts.model_dump_json(),
        )
        for m in manifests
    }
    if len(kinds) != 1 or len({index.shard(n).columns for index in indices for n in range(index.num_shards)}) > 1:
        raise DataError("The parts differ in class, source, facts or columns. Write them with the same arguments.")
    salt = read_or_make_salt(folder, salt)
    shards: list[ShardInfo] = []
    digests: list[ShardDigest] = []
    tree = MerkleTree()
    for part, index, manifest in zip(places, indices, manifests, strict=True):
        below, store = part.relative_to(folder).as_posix(), ShardCache(part, None)
        for number, digest in zip(range(index.num_shards), manifest.shards, strict=True):
            info = index.shard(number)
            shard = MdsShard(store.open(ShardFiles(info.raw, info.zip, info.compression)), info, allow_pickle=True)
            first = sum(before.rows for before in digests)
            for row in range(shard.num_rows):
                tree.append(row_leaf(salt, first + row, hashlib.sha256(shard.sample(row)).digest()))
            shards.append(_moved(info, below))
            digests.append(digest.model_copy(update={"name": f"{below}/{digest.name}"}))
    merged = one.model_copy(
        update={
            "num_rows": sum(m.num_rows for m in manifests),
            "num_bytes": sum(m.num_bytes for m in manifests),
            "shards": tuple(digests),
            "row_root": tree.root().hex(),
            "salt_commitment": hashlib.sha256(salt).hexdigest(),
        }
    )
    _finish(Target(str(folder)), shards, merged)
    return merged


def _check_parts(parts: Sequence[Path], folder: Path) -> None:
    foreign = [part for part in parts if (part / "index.json").exists() and not (part / MANIFEST_FILE).exists()]
    if foreign or not parts:
        which = f"{foreign[0]} has no {MANIFEST_FILE}" if foreign else "No parts are given"
        raise DataError(f"{which}. Parts that ShardWriter wrote are merged; any folders are read together as a list.")
    if (folder / JOURNAL_FILE).exists():
        raise DataError(f"{folder} holds a source that was written there. Merge into another directory above.")
    for number, part in enumerate(parts):
        if folder not in part.parents or not (part / "index.json").exists():
            raise DataError(f"{part} isn't a finished source below {folder}. Write the parts there first.")
        if part in parts[:number]:
            raise DataError(f"{part} is given twice, and the merged source would have its rows twice. Give it once.")


def _moved(info: ShardInfo, below: str) -> ShardInfo:
    def moved(file: FileInfo) -> FileInfo:
        return dataclasses.replace(file, basename=f"{below}/{file.basename}")

    return dataclasses.replace(info, raw=moved(info.raw), zip=None if info.zip is None else moved(info.zip))


def _finish(target: Target, shards: Sequence[ShardInfo], manifest: SourceManifest) -> None:
    """Put manifest and index in place, the index last."""
    try:
        target.put(MANIFEST_FILE, manifest.to_bytes())
        target.put("index.json", dump_index(shards, {"cosmati": manifest.told}))
    except OSError as error:
        msg = (
            f"{target.url} can't be finished: {error.strerror}. All its shards are whole: make room, open the writer "
            "again with the same arguments (append=True, where it was finished before), and finish it."
        )
        raise DataError(msg) from error
