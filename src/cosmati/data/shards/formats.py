"""A shard opened, whatever its format."""

from __future__ import annotations

from cosmati.data.shards.cache import ShardCache, ShardFiles
from cosmati.data.shards.index import ShardInfo
from cosmati.data.shards.mds import MdsShard
from cosmati.data.shards.parquet import ParquetShard
from cosmati.data.shards.split import SplitShard


def files_of(info: ShardInfo) -> list[ShardFiles]:
    """Return the files of a shard: its rows, and where the format has one, the file of their offsets."""
    pairs = [(info.raw, info.zip), *([info.meta] if info.meta else [])]
    return [ShardFiles(raw, packed, info.compression) for raw, packed in pairs]


def open_shard(
    cache: ShardCache, info: ShardInfo, *, allow_pickle: bool = False
) -> MdsShard | ParquetShard | SplitShard:
    """Fetch, verify and open a shard.

    Raises:
        DataError: it can't be had, or isn't what the index says.
    """
    path, *meta = [cache.open(files) for files in files_of(info)]
    if meta:
        return SplitShard(path, meta[0], info)
    return (ParquetShard if info.format == "parquet" else MdsShard)(path, info, allow_pickle=allow_pickle)
