"""MDS to Parquet and back, each row the same bits on both sides, its provenance kept."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmati.data.shards.cache import ShardCache, ShardFiles
from cosmati.data.shards.commitment import Commitment
from cosmati.data.shards.index import ShardIndex, ShardInfo, parse_index
from cosmati.data.shards.journal import first_entry
from cosmati.data.shards.manifest import MANIFEST_FILE, SALT_FILE, SourceFacts, SourceManifest
from cosmati.data.shards.mds import MdsShard
from cosmati.data.shards.parquet import ParquetShard, parquet_index, write_parquet
from cosmati.data.shards.remote import Remote, local_path
from cosmati.data.shards.sources import SOURCES_FILE, listed_sources
from cosmati.data.shards.writer import JOURNAL_FILE, ShardWriter
from cosmati.errors import DataError
from cosmati.storage.atomic import publish
from cosmati.storage.lock import FileLock

Progress = Callable[[int, int], None]
_LOCK_FILE = ".lock"


def mds_to_parquet(source: str | Path, out: str | Path, *, on_shard: Progress = lambda _done, _all: None) -> int:
    """Write a Parquet file for each shard of a source; return the number of rows.

    The manifest and its salt come along: the row root in it is over rows as MDS encodes them, which Parquet gives back.

    The files appear in the output directory together, once all are whole: until then they lie beside it, in
    `.NAME.unfinished`, which the next conversion to that place begins with removing.

    Raises:
        DataError: the source can't be read, the output directory isn't empty, or another process converts into it.
    """
    source, out = _directory(source), _directory(out).resolve()
    index = parse_index((source / "index.json").read_bytes(), name=f"{source}/index.json")
    try:
        with _whole_or_not(out) as draft:
            _write_parquet_files(source, index, draft, on_shard)
    except OSError as error:
        msg = f"{out} can't be written: {error.strerror or error}. Nothing is left there. Make room, or go elsewhere."
        raise DataError(msg) from error
    return index.num_rows


def _write_parquet_files(source: Path, index: ShardIndex, out: Path, on_shard: Progress) -> None:
    store = ShardCache(source, None)
    own = index.extra.get("cosmati")
    told = (
        {k: v for k, v in own.items() if k in ("class", "band", "grades", "manifest_sha256")}
        if isinstance(own, dict)
        else {}
    )
    for number in range(index.num_shards):
        info = index.shard(number)
        if info.format != "mds":
            raise DataError(f"{source} holds {info.format} shards, and MDS is converted. Write it again as MDS first.")
        shard = MdsShard(store.open(ShardFiles(info.raw, info.zip, info.compression)), info, allow_pickle=True)
        rows = (shard.row(row) for row in range(shard.num_rows))
        write_parquet(out / f"shard.{number:05d}.parquet", info.columns, rows, told)
        on_shard(number + 1, index.num_shards)
    for name in (MANIFEST_FILE, SALT_FILE):
        if (source / name).exists():
            shutil.copy2(source / name, out / name)


@contextlib.contextmanager
def _whole_or_not(out: Path) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `out` at the end; after an error it's gone."""
    if out.exists() and (not out.is_dir() or any(out.iterdir()) or out.is_mount()):
        raise DataError(f"{out} is no empty directory within a file system. Give one, or one that isn't there yet.")
    draft = out.with_name(f".{out.name}.unfinished")
    draft.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(draft / _LOCK_FILE)
    except BlockingIOError as error:
        raise DataError(f"{out} is being converted into by another process. Wait for it, or name another.") from error
    try:
        for left in draft.iterdir():
            if left.name != _LOCK_FILE:
                left.unlink()
        yield draft
        publish(draft, out)
        (out / _LOCK_FILE).unlink()
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        lock.release()


def parquet_to_mds(
    source: str | Path,
    out: str | Path,
    *,
    class_path: str | None = None,
    name: str | None = None,
    on_shard: Progress = lambda _done, _all: None,
    **options: Any,  # noqa: ANN401  (ShardWriter's own)
) -> SourceManifest:
    """Write a source from Parquet files. Broken off, it goes on where it was, if the files are the same.

    Args:
        source: directory of the files.
        out: directory of the source: empty, or that of the same conversion.
        class_path: of all rows; None takes what the files say.
        name: of the source; None takes the manifest's beside the files, or the directory's.
        on_shard: told of progress: row groups done, and of all.
        options: of `ShardWriter`.

    Raises:
        DataError: nobody says the class, the files can't be read, they changed since the conversion began, or the
            output directory holds something else.
    """
    source, out = _directory(source), _directory(out)
    index = parquet_index(Remote(str(source)))
    if index is None:
        raise DataError(f"There are no Parquet files in {source}. {_listed_there(source)}".rstrip())
    told = index.extra.get("cosmati", {})
    before = (
        SourceManifest.from_bytes((source / MANIFEST_FILE).read_bytes()) if (source / MANIFEST_FILE).exists() else None
    )
    class_path = class_path or told.get("class")
    if class_path is None:
        raise DataError(f"The files in {source} don't say their class. Give class_path, such as open/permissive.")
    facts = SourceFacts() if before is None else before.facts
    salt = (source / SALT_FILE).read_bytes() if (source / SALT_FILE).exists() else None
    columns = {column.name: column.encoding for column in index.shard(0).columns}
    title = name or (before.source if before else source.name)
    inputs = _digests(source, index.shards)
    commitment = Commitment(inputs).digest
    _refuse_another(source, out, commitment)
    with ShardWriter(
        out,
        columns,
        class_path=class_path,
        source=title,
        commitment=commitment,
        **{"facts": facts, "salt": salt, "band": told.get("band", 0), "grades": told.get("grades"), **options},
    ) as writer:
        for row in _rows(source, index.shards, on_shard):
            writer.write(row)
        if _digests(source, index.shards) != inputs:
            raise DataError(
                f"The files in {source} changed while they were converted, so the rows may be of two versions. Leave "
                "them alone, and convert into an empty directory."
            )
    return SourceManifest.from_bytes((out / MANIFEST_FILE).read_bytes())


def _digests(folder: Path, shards: Sequence[ShardInfo]) -> dict[str, str]:
    """Return SHA-256 in hex of the files, by name."""
    found = {}
    for name in sorted({shard.raw.basename for shard in shards}):
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _refuse_another(source: Path, out: Path, commitment: str) -> None:
    """Refuse a directory that holds anything but what this very conversion has left there."""
    entry = first_entry(out / JOURNAL_FILE)
    if entry is None and out.exists() and any(path.name != JOURNAL_FILE for path in out.iterdir()):
        raise DataError(f"{out} isn't empty, and no conversion was begun there. Give an empty directory.")
    if entry is not None and entry["commitment"] != commitment:
        what = (
            "was converted from other files than" if entry["commitment"] else "was written otherwise, and not from what"
        )
        raise DataError(f"{out} {what} {source} holds now. Give an empty directory.")


def _listed_there(folder: Path) -> str:
    if not (folder / SOURCES_FILE).exists():
        return ""
    paths = [str(folder / entry["path"]) for entry in listed_sources(Remote(str(folder))) or ()]
    return f"It's a data set: convert its sources one by one: {', '.join(paths[:3])}{', ...' * (len(paths) > 3)}."


def _rows(source: Path, shards: Sequence[ShardInfo], on_shard: Progress) -> Iterator[Mapping[str, Any]]:
    for number, info in enumerate(shards):
        shard = ParquetShard(source / info.raw.basename, info, allow_pickle=True)
        for row in range(shard.num_rows):
            yield shard.row(row)
        on_shard(number + 1, len(shards))


def _directory(path: str | Path) -> Path:
    found = local_path(str(path))
    if found is None:
        raise DataError(f"{path} is remote, and conversion reads and writes directories here. Copy it, or its result.")
    return found
