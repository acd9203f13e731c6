"""`cosmati data`: raw files into shards, and everything one asks of shards before training on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from cosmati.cli.data_find import Cache, find, index_subjects_of
from cosmati.cli.data_inputs import Inputs
from cosmati.cli.data_measures import SaidOfRows
from cosmati.cli.data_options import (
    Also,
    AlsoField,
    By,
    ByField,
    Grade,
    GradeField,
    LabelsOf,
    Policy,
    ReadKind,
    Replace,
    TextField,
)
from cosmati.data.graded import SourceKind
from cosmati.data.ingest import Rows
from cosmati.data.opened import CacheOptions, open_sources
from cosmati.data.order.quality import shuffle_quality, simulate_cache
from cosmati.data.shards.convert import mds_to_parquet, parquet_to_mds
from cosmati.data.shards.dataset import noted_labels, write_dataset
from cosmati.data.shards.manifest import SourceFacts, SourceManifest
from cosmati.data.shards.sources import listed_sources
from cosmati.data.shards.upload import Destination
from cosmati.data.shards.verify import source_urls, verify_list, verify_source
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from cosmati.explorer.class_schedule import class_schedule_svg
from cosmati.progress import ProgressDisplay

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Write, inspect, verify, convert, plan and search streamed data."
)
Url = Annotated[str, typer.Argument(metavar="URL", help="A data set or a source: a directory, or s3://, hf://, ...")]
Keep = Annotated[
    Path | None, typer.Option("--keep", help="Of a remote: the directory here that holds its salt; it isn't uploaded.")
]

app.command("index-subjects")(index_subjects_of)
app.command()(find)


@app.command()
def write(  # noqa: PLR0913, PLR0917  (a command's options)
    out: Annotated[str, typer.Argument(metavar="OUT", help="The data set: a directory, or s3://, hf://, ...")],
    inputs: Annotated[list[Path] | None, typer.Argument(metavar="[IN]...", help="Files or directories.")] = None,
    kind: ReadKind = None,
    class_path: Annotated[str, typer.Option("--class", help="Class of all rows, such as open/permissive.")] = "",
    class_field: Annotated[str, typer.Option(help="JSON Lines, Parquet: the field that holds each row's class.")] = "",
    text_field: TextField = "",
    append: Annotated[bool, typer.Option("--append", help="Add new inputs, under facts of their own.")] = False,
    replace: Replace = False,
    keep: Keep = None,
    source: Annotated[str, typer.Option(help="Name of the source; the data set's if not given.")] = "",
    pack: Annotated[int, typer.Option(help="Pack the text's bytes into rows of so many tokens; 0 keeps text.")] = 0,
    labels: Annotated[bool, typer.Option(help="Images: the folder is the label.")] = True,
    labels_of: LabelsOf = None,
    compression: Annotated[str, typer.Option(help="zstd, zstd:7, gz, br, bz2, snappy; empty for none.")] = "",
    size_limit: Annotated[int, typer.Option(help="Bytes of an uncompressed shard at most.")] = 1 << 26,
    origin: Annotated[str, typer.Option(help="For the manifest: where the data come from.")] = "",
    licence: Annotated[str, typer.Option(help="For the manifest: SPDX identifier, or the contract.")] = "",
    skip_bad_rows: Annotated[bool, typer.Option(help="Leave bad rows out and list them.")] = False,
    by: By = None,
    by_field: ByField = None,
    grade: Grade = None,
    grade_field: GradeField = None,
    policy: Policy = None,
    also: Also = None,
    also_field: AlsoField = "",
) -> None:
    """Write shards with provenance: one source for each class, with manifest and index.

    Rows keep what they were written with: the data set notes its inputs by digest, and all that is said of them. A
    write that was broken off goes on where it was: run the same command again. Another class is added beside those
    that are there. Inputs that changed, or another licence, are refused by name; then --append or --replace says what
    is meant.

    Rows of other grades, bands or further classes are a source of their own, so that what was measured is signed with
    the shards. A field's value is a grade's name; with --policy also a number, put between its thresholds.

    A remote takes each shard as it's full, and its index last. The salt, which keeps others from guessing rows, is
    never uploaded: --keep names the directory here for it, and for what a broken write needs to go on.

    \b
    Examples:
      cosmati data write corpus notes/*.txt --class licensed/news --licence "contract 12" --pack 1024
      cosmati data write corpus more/*.txt --class licensed/news --licence "contract 13" --pack 1024 --append
      cosmati data write corpus crawl.jsonl.gz --class-field class
      cosmati data write corpus posts.jsonl --class open/permissive --text-field body --pack 1024
      cosmati data write corpus papers.jsonl --class medical --grade-field evidence=level --by-field rater=reviewer
      cosmati data write corpus papers.jsonl --class medical --grade-field trust=score --policy policy.yaml
      cosmati data write corpus rows.parquet --class-field class --also-field topics
      cosmati data write photos images/ more-images/ --class customer/pii
      cosmati data write held-out test-images/ --class customer/pii --labels-of photos
      cosmati data write s3://bucket/corpus notes/ --class open/psf --keep corpus-secrets
      cosmati data write code --kind packages --pack 512
    """  # noqa: D301
    if append and replace:
        raise DataError("--append keeps what is there, and --replace doesn't. Give one of them.")
    place = Destination(out, keep)
    said = SaidOfRows(policy, grade or (), grade_field or (), also or (), also_field, by or (), by_field or ())
    wanted = Inputs(tuple(inputs or ()), kind, class_path, class_field, text_field, pack, labels, skip_bad_rows, said)
    rows, before = wanted.rows(_label_names(place, labels_of)), _listed(place)
    with ProgressDisplay("writing") as progress:
        manifests = write_dataset(
            rows,
            place,
            rows.columns,
            class_of=rows.class_of,
            source=source or out.rstrip("/").rpartition("/")[2],
            facts=SourceFacts(origin=origin, licence=licence, annotators=said.ids),
            reading=wanted.reading(),
            mode="append" if append else "replace" if replace else "new",
            on_row=lambda number: progress.update(None, f"{number:,} rows"),
            compression=compression or None,
            size_limit=size_limit,
        )
    _report(manifests, rows, before - _listed(place))
    option, argument = ("", "") if keep is None else (" --cache DIR", ", cache=...")
    typer.echo(f"Look at it:   cosmati data inspect {out}{option}\nTrain on it:  StreamingDataset({out!r}{argument})")


def _label_names(place: Destination, like: Path | None) -> Sequence[str]:
    """Return the labels that have their numbers: those of earlier writes, and before any those of another data set."""
    own, other = noted_labels(place), noted_labels(Destination(str(like))) if like else ()
    if like and not other:
        raise DataError(f"{like} notes no labels: it's no data set of images here. Name one that `data write` wrote.")
    if own and other and own[: len(other)] != other[: len(own)]:
        raise DataError(f"{place.target.url} has other labels than {like} already. Write it anew, to an empty place.")
    return max(own, other, key=len)


def _report(manifests: Iterable[SourceManifest], rows: Rows, replaced: Iterable[str]) -> None:
    """Say what was written, what it took the place of, and what was left out."""
    for manifest in manifests:
        size = f"{manifest.num_rows:>10,} rows  {manifest.num_bytes / 1e6:>9,.1f} MB"
        kind = SourceKind(manifest.band, tuple(manifest.grades.items()), manifest.also)
        typer.echo(f"{manifest.class_path:<28} {size}  {kind}".rstrip())
    for path in sorted(replaced):
        typer.echo(f"replaced and removed: {path}")
    for left_out in (*(f"{number:,} {why}" for why, number in rows.left_out.items()), *rows.skipped):
        typer.echo(f"left out: {left_out}", err=True)


def _listed(place: Destination) -> set[str]:
    return {entry["path"] for entry in listed_sources(place.target) or ()}


def _show_shards(progress: ProgressDisplay) -> Callable[[int, int], None]:
    return lambda done, total: progress.update(done / total, f"{done:,} of {total:,} shards")


@app.command()
def inspect(url: Url, cache: Cache = None, rows: Annotated[int, typer.Option(help="Rows to show.")] = 1) -> None:
    """Show sources, classes, columns, sizes, the first rows, and of images the name of each label.

    \b
    Example:
      cosmati data inspect corpus --rows 3
    """  # noqa: D301
    sources = open_sources(url, options=CacheOptions(cache))
    for source in sources:
        info = source.index.shard(0) if source.index.num_shards else None
        typer.echo(f"{source.url}")
        typer.echo(f"  class    {source.class_path}")
        if told := str(SourceKind(source.band, tuple(source.grades.items()))):
            typer.echo(f"  measured {told}")
        typer.echo(f"  rows     {source.num_rows:,} in {source.index.num_shards:,} shards")
        typer.echo(f"  index    sha256 {source.index.digest}")
        for column in info.columns if info else ():
            typer.echo(f"  column   {column.name}: {column.encoding}")
        for row in range(min(rows, int(source.index.shard_rows[0])) if info else 0):
            for name, values in source.rows(np.asarray([0]), np.asarray([row])).items():
                value = values[0].item() if isinstance(values[0], np.generic) else values[0]
                text = repr(value).replace("\n", " ")
                typer.echo(f"  row {row}    {name} = {text[:90]}{'…' if len(text) > 90 else ''}")
    for number, name in enumerate(noted_labels(Destination(url)) if Path(url).is_dir() else ()):
        typer.echo(f"label {number} is {name}")


@app.command()
def describe(
    folder: Annotated[Path, typer.Argument(help="The folder of the files: a tokenizer, base weights, statistics.")],
    class_path: Annotated[str, typer.Option("--class", help="Class under which they're signed.")],
    source: Annotated[str, typer.Option(help="Their name; the folder's, if not given.")] = "",
    version: Annotated[str, typer.Option(help="Of their content.")] = "1",
    licence: Annotated[str, typer.Option(help="SPDX identifier, or the contract.")] = "",
    licence_until: Annotated[str, typer.Option(help="The licence's last day, YYYY-MM-DD; no end if not given.")] = "",
    origin: Annotated[str, typer.Option(help="Where they're from: a URL, a name, a contract.")] = "",
) -> None:
    """Write the manifest of files that are no rows, so that `cosmati data sign` can sign them as data are.

    \b
    Example:
      cosmati data describe tokenizer --class open/permissive --licence Apache-2.0
      cosmati data sign tokenizer --authority authority --keys ~/keys
    """  # noqa: D301
    from cosmati.data.plain_files import describe_files

    if rows := next((name for name in ("index.json", "sources.json") if (folder / name).is_file()), None):
        raise DataError(f"{folder} has {rows}: it's a data set, and `cosmati data write` has written its manifest.")
    facts = SourceFacts(origin=origin, licence=licence, licence_valid_until=_day(licence_until))
    manifest = describe_files(
        folder, class_path=class_path, source=source or folder.resolve().name, version=version, facts=facts
    )
    typer.echo(f"{manifest.class_path:<28} {manifest.num_rows:>10,} file(s)  {manifest.num_bytes / 1e6:>9,.1f} MB")
    typer.echo(f"Have it signed:  cosmati data sign {folder} --authority AUTHORITY")
    typer.echo(f"Name it:         artifact(KIND, {str(folder)!r}, authority=Authority(...))")


def _day(text: str) -> str:
    try:
        return text and date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise DataError(f"--licence-until {text!r} is no day. Write it as 2027-12-31.") from error


@app.command()
def sign(
    url: Url,
    authority: Annotated[Path, typer.Option(help="The folder of the authority's repository.")],
    keys: Annotated[
        list[Path] | None, typer.Option("--keys", help="A folder of private keys; again for more. AUTHORITY-keys.")
    ] = None,
) -> None:
    """Sign the manifest of each source: that it's of its class, by the keys that the authority lets sign that class.

    Its shards aren't read: `cosmati data verify` compares them with the manifest. Where more people must sign than
    have keys here, what there is waits in AUTHORITY/pending, and the next one runs the same command.

    \b
    Example:
      cosmati data sign corpus --authority authority --keys ~/keys --keys authority-keys
    """  # noqa: D301
    from cosmati.cli.keys import ring_of
    from cosmati.data.signing import sign_sources

    for name, state in sign_sources(url, authority, ring_of(authority, keys)):
        typer.echo(f"{name.class_path:<28} {name.source} {name.version}: {state}")


@app.command()
def verify(url: Url, cache: Cache = None, keep: Keep = None) -> None:
    """Read every shard, and compare it with index and manifest: hashes, counts, and the rows' Merkle root.

    The root is computed from the rows themselves, with the salt that lies beside them: a row that was changed is found
    even where every file's hash was made to fit. Without the salt (of a remote: --keep) that isn't checked, and said.
    Exits with 1 and says what is wrong if anything doesn't hold.

    \b
    Examples:
      cosmati data verify corpus
      cosmati data verify s3://bucket/corpus --cache fetched --keep corpus-secrets
    """  # noqa: D301
    problems = verify_list(url)
    for line in problems:
        typer.echo(f"BAD  {line}")
    is_bad = bool(problems)
    for one in source_urls(url):
        own = None if keep is None else keep / one.removeprefix(url.rstrip("/")).lstrip("/")
        with ProgressDisplay("verifying") as progress:
            found = verify_source(one, cache=cache, keep=own, on_shard=_show_shards(progress))
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
    source: Annotated[str, typer.Argument(help="A source of MDS shards, or a directory of Parquet files.")],
    out: Annotated[str, typer.Argument(help="An empty directory; from Parquet, one where the same was broken off.")],
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
        if Path(source, "index.json").exists():
            given = f"--class {class_path}" if class_path else f"--compression {compression}" if compression else ""
            if given:
                raise DataError(
                    f"{given} is for Parquet that becomes MDS. {source} is MDS already, and its rows keep the class "
                    "that they were written with. Leave it out."
                )
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
