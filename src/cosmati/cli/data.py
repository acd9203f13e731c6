"""`cosmati data`: raw files into shards, and everything one asks of shards before training on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cosmati.corpora.python_rows import read_python_packages
from cosmati.data.ingest import Rows, class_by_field, read_image_folder, read_jsonl, read_text
from cosmati.data.opened import CacheOptions, open_sources
from cosmati.data.order.quality import shuffle_quality, simulate_cache
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.shards.convert import mds_to_parquet, parquet_to_mds
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.verify import source_urls, verify_source
from cosmati.data.shards.writer import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError
from cosmati.explorer.class_schedule import class_schedule_svg
from cosmati.progress import ProgressDisplay
from cosmati.provenance.taxonomy import software_licences

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Write, inspect, verify, convert and plan streamed data."
)
Url = Annotated[str, typer.Argument(metavar="URL", help="A data set or a source: a directory, or s3://, hf://, ...")]
Cache = Annotated[Path | None, typer.Option("--cache", help="Where fetched shards are kept; needed for a remote.")]


class Kind(StrEnum):
    """What `write` reads."""

    JSONL = "jsonl"
    TEXT = "text"
    IMAGES = "images"
    PACKAGES = "packages"


@app.command()
def write(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the data set.")],
    inputs: Annotated[list[Path] | None, typer.Argument(metavar="[IN]...", help="Files or directories.")] = None,
    kind: Annotated[Kind, typer.Option(help="What the inputs are; `packages` is this machine's Python.")] = Kind.TEXT,
    class_path: Annotated[str, typer.Option("--class", help="Class of all rows, such as open/permissive.")] = "",
    class_field: Annotated[str, typer.Option(help="JSON Lines: the field that holds each row's class.")] = "",
    source: Annotated[str, typer.Option(help="Name of the source; the directory's if not given.")] = "",
    pack: Annotated[int, typer.Option(help="Pack the text's bytes into rows of so many tokens; 0 keeps text.")] = 0,
    compression: Annotated[str, typer.Option(help="zstd, zstd:7, gz, br, bz2, snappy; empty for none.")] = "",
    size_limit: Annotated[int, typer.Option(help="Bytes of an uncompressed shard at most.")] = 1 << 26,
    origin: Annotated[str, typer.Option(help="For the manifest: where the data come from.")] = "",
    licence: Annotated[str, typer.Option(help="For the manifest: SPDX identifier, or the contract.")] = "",
    skip_bad_rows: Annotated[bool, typer.Option(help="Leave bad rows out and list them.")] = False,
) -> None:
    """Write shards with provenance: one source for each class, with manifest and index.

    A write that was broken off goes on where it was: run the same command again.

    \b
    Examples:
      cosmati data write corpus notes/*.txt --class licensed/news --pack 1024
      cosmati data write corpus crawl.jsonl.gz --kind jsonl --class-field licence
      cosmati data write photos images/ --kind images --class customer/pii
      cosmati data write code --kind packages --pack 512
    """  # noqa: D301
    rows = _rows(kind, inputs or [], class_path, class_field, "record" if skip_bad_rows else "raise")
    if pack:
        column = "content" if kind is Kind.PACKAGES else "text"
        tokens = tokenize(rows, ByteTokenizer(), column=column)
        rows = pack_rows(tokens, Packing(length=pack), class_names=_class_names(kind, class_path))
    facts = SourceFacts(origin=origin, licence=licence)
    with ProgressDisplay("writing") as progress:
        manifests = write_dataset(
            _counted(rows, progress),
            out,
            rows.columns,
            class_of=rows.class_of,
            source=source or out.name,
            facts=facts,
            compression=compression or None,
            size_limit=size_limit,
        )
    for manifest in manifests:
        typer.echo(f"{manifest.class_path:<28} {manifest.num_rows:>10,} rows  {manifest.num_bytes / 1e6:>9,.1f} MB")
    for bad in rows.skipped:
        typer.echo(f"left out: {bad}", err=True)
    typer.echo(f"Look at it:   cosmati data inspect {out}\nTrain on it:  StreamingDataset({str(out)!r})")


def _rows(kind: Kind, inputs: list[Path], class_path: str, class_field: str, on_error: Any) -> Rows:  # noqa: ANN401
    if kind is Kind.PACKAGES:
        return read_python_packages(inputs or None, on_error=on_error)
    if not inputs:
        raise DataError("There is nothing to read. Name files or directories after OUT.")
    if not class_path and not class_field:
        raise DataError("Rows have no class. Give --class open/permissive, say, or --class-field with --kind jsonl.")
    class_of = class_by_field(class_field) if class_field else class_path
    if kind is Kind.JSONL:
        return read_jsonl(inputs, class_of=class_of, on_error=on_error)
    if kind is Kind.IMAGES:
        return read_image_folder(inputs[0], class_of=class_of, on_error=on_error)
    return read_text(inputs, class_of=class_of, on_error=on_error)


def _class_names(kind: Kind, class_path: str) -> tuple[str, ...]:
    if kind is Kind.PACKAGES:
        return software_licences().classes
    if not class_path:
        raise DataError("To pack, all rows must be of one class: give --class. Write each class by itself.")
    return (class_path,)


def _counted(rows: Iterable[Mapping[str, Any]], progress: ProgressDisplay) -> Iterator[Mapping[str, Any]]:
    """Show how many rows went by."""
    for number, row in enumerate(rows, 1):
        progress.update(None, f"{number:,} rows")
        yield row


def _show_shards(progress: ProgressDisplay) -> Callable[[int, int], None]:
    return lambda done, total: progress.update(done / total, f"{done:,} of {total:,} shards")


@app.command()
def inspect(url: Url, cache: Cache = None, rows: Annotated[int, typer.Option(help="Rows to show.")] = 1) -> None:
    """Show sources, classes, columns, sizes, and the first rows.

    \b
    Example:
      cosmati data inspect corpus --rows 3
    """  # noqa: D301
    sources = open_sources(url, options=CacheOptions(cache))
    for source in sources:
        info = source.index.shard(0) if source.index.num_shards else None
        typer.echo(f"{source.url}")
        typer.echo(f"  class    {source.class_path}")
        typer.echo(f"  rows     {source.num_rows:,} in {source.index.num_shards:,} shards")
        typer.echo(f"  index    sha256 {source.index.digest}")
        for column in info.columns if info else ():
            typer.echo(f"  column   {column.name}: {column.encoding}")
        for row in range(min(rows, int(source.index.shard_rows[0])) if info else 0):
            for name, values in source.rows(np.asarray([0]), np.asarray([row])).items():
                text = repr(values[0]).replace("\n", " ")
                typer.echo(f"  row {row}    {name} = {text[:90]}{'…' if len(text) > 90 else ''}")


@app.command()
def verify(url: Url, cache: Cache = None) -> None:
    """Read every shard, and compare it with index and manifest: hashes, counts, and the rows' Merkle root.

    Exits with 1 and says what is wrong if anything doesn't hold.

    \b
    Example:
      cosmati data verify corpus
    """  # noqa: D301
    is_bad = False
    for one in source_urls(url):
        with ProgressDisplay("verifying") as progress:
            found = verify_source(one, cache=cache, on_shard=_show_shards(progress))
        is_bad |= bool(found.problems)
        typer.echo(f"{'BAD' if found.problems else 'ok '}  {one}  {found.class_path}, {found.num_rows:,} rows")
        for line in found.problems:
            typer.echo(f"     {line}")
        for line in found.unchecked:
            typer.echo(f"     not checked: {line}")
    if is_bad:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A source of MDS shards, or a directory of Parquet files.")],
    out: Annotated[Path, typer.Argument(help="An empty directory.")],
    class_path: Annotated[str, typer.Option("--class", help="Class of rows from Parquet that don't say it.")] = "",
    compression: Annotated[str, typer.Option(help="Of MDS shards: zstd, zstd:7, gz, br, bz2, snappy.")] = "",
) -> None:
    """Convert MDS to Parquet, or Parquet to MDS. Each row is the same bits on both sides.

    \b
    Examples:
      cosmati data convert corpus/open/psf parquet/
      cosmati data convert parquet/ corpus2 --class open/psf
    """  # noqa: D301
    with ProgressDisplay("converting") as progress:
        on_shard = _show_shards(progress)
        if (source / "index.json").exists():
            num_rows = mds_to_parquet(source, out, on_shard=on_shard)
        else:
            made = parquet_to_mds(
                source, out, class_path=class_path or None, compression=compression or None, on_shard=on_shard
            )
            num_rows = made.num_rows
    typer.echo(f"{num_rows:,} rows in {out}")


@app.command()
def plan(
    url: Url,
    cache: Cache = None,
    rows_per_step: Annotated[int, typer.Option(help="Rows in a step.")] = 256,
    num_microbatches: Annotated[int, typer.Option(help="V, microbatches a step.")] = 8,
    world: Annotated[int, typer.Option(help="Ranks.")] = 1,
    window_rows: Annotated[int, typer.Option(help="Rows are shuffled within windows of about so many.")] = 1 << 17,
    cache_shards: Annotated[int, typer.Option(help="Shards that a rank's cache holds.")] = 64,
    seed: Annotated[int, typer.Option(help="The run's seed.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Draw the class schedule into this SVG file.")] = None,
) -> None:
    """Show what a run would read, and when, without reading a row: downloads, cache, shuffle, schedule of classes.

    \b
    Example:
      cosmati data plan corpus --rows-per-step 512 --world 8 --picture plan.svg
    """  # noqa: D301
    data = StreamingDataset(url, seed=seed, window_rows=window_rows, cache=cache)
    order = StreamingSource(data, rows_per_step).order(seed=seed, num_microbatches=num_microbatches, route_pure=True)
    typer.echo(f"{len(data):,} rows an epoch in {order.steps_per_epoch:,} steps of {rows_per_step}")
    for source, rows in zip(data.sources, data.orders(seed), strict=True):
        typer.echo(f"\n{source.url}  ({source.class_path}, {source.num_rows:,} rows)")
        if source.num_rows < 2:
            continue
        use, quality = simulate_cache(rows, world=world, cache_shards=cache_shards), shuffle_quality(rows)
        largest = source.index.largest_shard / 1e6
        typer.echo(f"  downloads  {max(use.downloads):,} a rank at most, of {max(use.distinct):,} shards that it needs")
        typer.echo(f"  cache      {use.peak:,} shards at once, {use.peak * largest:,.1f} MB a rank at most")
        typer.echo(
            f"  shuffle    neighbours of one shard {quality.same_shard:.2%} (a full shuffle has "
            f"{quality.same_shard_of_full_shuffle:.2%}); rows move {quality.displacement:.1%} of the source "
            f"(full {quality.displacement_of_full_shuffle:.1%})"
        )
    num_steps = min(order.steps_per_epoch, 512)
    schedule = [[order.class_id(step, index) for index in range(num_microbatches)] for step in range(num_steps)]
    typer.echo(f"\nclasses over the first {num_steps} steps, a letter for each microbatch:")
    letters = "abcdefghijklmnopqrstuvwxyz"
    for step in schedule[:6]:
        typer.echo("  " + "".join(letters[(class_id or 0) % 26] for class_id in step))
    for class_id, name in enumerate(data.class_names):
        share = sum(one == class_id for step in schedule for one in step) / (num_steps * num_microbatches)
        typer.echo(f"  {letters[class_id % 26]} = {name}, {share:.2%}")
    if picture is not None:
        picture.write_text(class_schedule_svg(schedule, data.class_names), encoding="utf-8")
        typer.echo(f"Picture: {picture}")
