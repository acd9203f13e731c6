"""What is wrong with a data set's arguments, said in words."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmati.data.opened import CacheOptions, OpenedSource
from cosmati.data.shards.parquet import ParquetIndex
from cosmati.data.shards.remote import local_path
from cosmati.errors import DataError

_THEIRS = {
    "remote": "give it as the first argument",
    "local": "cache='some/folder'",
    "split": "give the folder of the split",
    "streams": "give the folders as a list",
    "batch_size": "StreamingLoader(dataset, batch_size), the batch of all ranks together",
    "epoch_size": "dataset.epochs_of(rows)",
    "cache_limit": "cache=CacheOptions(folder, max_bytes=...)",
    "shuffle_seed": "seed=",
    "shuffle_algo": "window_rows=",
    "shuffle_block_size": "window_rows=",
    "predownload": "leave it out",
    "num_canonical_nodes": "leave it out: the order doesn't depend on the nodes",
    "keep_zip": "leave it out",
    "validate_hash": "leave it out: hashes are always checked",
    "download_retry": "cache=CacheOptions(folder, deadline_seconds=...)",
    "download_timeout": "cache=CacheOptions(folder, deadline_seconds=...)",
    "sampling_method": "leave it out: what an epoch leaves out comes in the next one",
    "sampling_granularity": "leave it out",
    "partition_algo": "leave it out",
    "batching_method": "leave it out",
    "allow_unsafe_types": "allow_pickle=",
    "replication": "StreamingLoader(dataset, batch_size, rank=, world=)",
}


def whole_number(name: str, value: Any, *, least: int | None = None) -> int:  # noqa: ANN401  (whatever was given)
    """Return a whole number as Python's, numpy's too.

    Raises:
        DataError: it's none, or too small; the message names the argument.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise DataError(f"{name}={value!r} isn't a whole number.") from error
    if least is not None and number < least:
        raise DataError(f"{name}={number}: give {least} or more.")
    return number


def refuse_their_options(options: Mapping[str, object]) -> None:
    """Refuse arguments of mosaicml-streaming's data set, with what to write.

    Raises:
        DataError: there are any.
    """
    found = [f"{name}: {mend}" for name, mend in _THEIRS.items() if name in options]
    if found:
        raise DataError(f"These arguments are mosaicml-streaming's. Here: {'; '.join(found)}. See docs/data.md.")


def listed_urls(urls: Any) -> list[str | Path]:  # noqa: ANN401  (whatever was given)
    """Return the places of some data.

    Raises:
        DataError: none is given, or what is given is no place.
    """
    if isinstance(urls, set | frozenset):
        raise DataError("The places are a set, and a set has no order: ranks would read different data. Give a list.")
    listed = [urls] if isinstance(urls, str | Path) else list(urls) if isinstance(urls, Sequence) else []
    if not listed or not all(isinstance(url, str | Path) for url in listed):
        raise DataError(f"{urls!r} is no place of data. Give a folder, a URL, or a list of such.")
    return listed


def refuse_twice(sources: Sequence[OpenedSource]) -> None:
    """Refuse a source, or a Parquet file, that is there twice by whichever name of its folder.

    Raises:
        DataError: there is one.
    """
    seen: set[str] = set()
    for source in sources:
        local = local_path(source.url)
        folder = source.url.rstrip("/") if local is None else str(local.resolve())
        names = source.index.file_names if isinstance(source.index, ParquetIndex) else ["index.json"]
        mine = {f"{folder}/{name}" for name in names}
        if mine & seen:
            msg = (
                f"{min(mine & seen)} is named twice, so each of its rows would come twice as if they were others. Name "
                "it once, and visit its class more often with repeats=."
            )
            raise DataError(msg)
        seen |= mine


def check_options(options: Mapping[str, Any], cache: CacheOptions) -> None:
    """Refuse what isn't of its kind, before it's found out deep below.

    Raises:
        DataError: the message names the argument.
    """
    whole_number("seed", options["seed"])
    whole_number("window_rows", options["window_rows"], least=1)
    whole_number("ahead_bytes", cache.ahead_bytes, least=0)
    seconds: object = cache.deadline_seconds
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise DataError(f"deadline_seconds={seconds!r}: give a number above 0.")
    if options["on_bad_row"] not in ("raise", "skip"):
        raise DataError(f"on_bad_row={options['on_bad_row']!r}: there are 'raise' and 'skip'.")
    if isinstance(options["columns"], str):
        raise DataError(f"columns={options['columns']!r} is a string. Give a tuple: columns=({options['columns']!r},).")
    if cache.max_bytes is not None and not isinstance(cache.max_bytes, int):
        raise DataError(f"max_bytes={cache.max_bytes!r} isn't a number of bytes. Give 10_000_000_000, say.")


def check_columns(sources: Sequence[OpenedSource], columns: Sequence[str]) -> None:
    """Refuse columns that the rows don't have.

    Raises:
        DataError: the message lists those that there are.
    """
    for source in sources:
        held = [column.name for column in source.index.shard(0).columns] if source.index.num_shards else list(columns)
        missing = [name for name in columns if name not in held]
        if missing:
            raise DataError(f"There is no column {missing[0]!r} in {source.url}; its rows have {', '.join(held)}.")


def check_loader(
    batch_size: object, rank: int, world: int, tail: object, tails: Sequence[str], options: Mapping[str, object]
) -> None:
    """Refuse what no loader can do.

    Raises:
        DataError: the message names the argument.
    """
    whole_number("batch_size", batch_size)
    if tail not in tails:
        raise DataError(f"tail={tail!r}: there are {', '.join(tails)}.")
    if not 0 <= rank < world:
        raise DataError(f"There is no rank {rank} of {world}: ranks are 0 to {world - 1}.")
    own = sorted({"shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn"} & set(options))
    if own:
        msg = (
            f"{own[0]}= would change the order or the batches, which are the data set's: use shuffle=, transform= of "
            "StreamingDataset, or tail=."
        )
        raise DataError(msg)
