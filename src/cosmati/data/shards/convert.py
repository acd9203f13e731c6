"""MDS to Parquet and back, each row the same bits on both sides, its provenance kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmati.data.shards.cache import ShardCache, ShardFiles
from cosmati.data.shards.index import ShardInfo, parse_index
from cosmati.data.shards.manifest import MANIFEST_FILE, SALT_FILE, SourceFacts, SourceManifest
from cosmati.data.shards.mds import MdsShard
from cosmati.data.shards.parquet import ParquetShard, parquet_index, write_parquet
from cosmati.data.shards.remote import Remote
from cosmati.data.shards.writer import ShardWriter
from cosmati.errors import DataError

Progress = Callable[[int, int], None]


def mds_to_parquet(source: str | Path, out: str | Path, *, on_shard: Progress = lambda _done, _all: None) -> int:
    """Write a Parquet file for each shard of a source; return the number of rows.

    The manifest and its salt come along: the row root in it is over rows as MDS encodes them, which Parquet gives back.

    Raises:
        DataError: the source can't be read, or the output directory holds Parquet files already.
    """
    source, out = Path(source), Path(out)
    index = parse_index((source / "index.json").read_bytes(), name=f"{source}/index.json")
    _refuse_full(out, "*.parquet")
    store = ShardCache(source, None)
    own = index.extra.get("cosmati")
    told = {k: v for k, v in own.items() if k in ("class", "band", "manifest_sha256")} if isinstance(own, dict) else {}
    for number in range(index.num_shards):
        info = index.shard(number)
        shard = MdsShard(store.open(ShardFiles(info.raw, info.zip, info.compression)), info, allow_pickle=True)
        rows = (shard.row(row) for row in range(shard.num_rows))
        write_parquet(out / f"shard.{number:05d}.parquet", info.columns, rows, told)
        on_shard(number + 1, index.num_shards)
    for name in (MANIFEST_FILE, SALT_FILE):
        if (source / name).exists():
            shutil.copy2(source / name, out / name)
    return index.num_rows


def parquet_to_mds(
    source: str | Path,
    out: str | Path,
    *,
    class_path: str | None = None,
    name: str | None = None,
    on_shard: Progress = lambda _done, _all: None,
    **options: Any,  # noqa: ANN401  (ShardWriter's own)
) -> SourceManifest:
    """Write a source from Parquet files.

    Args:
        source: directory of the files.
        out: directory of the source.
        class_path: of all rows; None takes what the files say.
        name: of the source; None takes the manifest's beside the files, or the directory's.
        on_shard: told of progress: row groups done, and of all.
        options: of `ShardWriter`.

    Raises:
        DataError: nobody says the class, or the files can't be read.
    """
    source, out = Path(source), Path(out)
    index = parquet_index(Remote(str(source)))
    if index is None:
        raise DataError(f"There are no Parquet files in {source}.")
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
    with ShardWriter(
        out,
        columns,
        class_path=class_path,
        source=title,
        **{"facts": facts, "salt": salt, "band": told.get("band", 0), **options},
    ) as writer:
        for number, row in enumerate(_rows(source, index.shards, on_shard)):
            if number >= writer.num_written:
                writer.write(row)
    return SourceManifest.from_bytes((out / MANIFEST_FILE).read_bytes())


def _rows(source: Path, shards: Sequence[ShardInfo], on_shard: Progress) -> Iterator[Mapping[str, Any]]:
    for number, info in enumerate(shards):
        shard = ParquetShard(source / info.raw.basename, info, allow_pickle=True)
        for row in range(shard.num_rows):
            yield shard.row(row)
        on_shard(number + 1, len(shards))


def _refuse_full(out: Path, pattern: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob(pattern)):
        raise DataError(f"{out} holds {pattern} already. Give an empty directory.")
