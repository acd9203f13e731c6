"""`cosmati data index-subjects` and `cosmati data find`: is this person, this file in there?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.subject_options import IndexFile, IndexKey, index_of
from cosmati.data.ingest.images import IMAGE_SUFFIXES
from cosmati.data.people import ChosenRows
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from cosmati.forget.near_duplicates import IMAGE_THRESHOLD, TEXT_THRESHOLD, Likeness, like_image, like_text
from cosmati.forget.reading import OnShare
from cosmati.forget.subjects import SubjectIndex, ids_to_delete, index_subjects, make_key, read_key
from cosmati.progress import ProgressDisplay

DataSets = Annotated[
    list[str], typer.Argument(metavar="DATA...", help="Data sets, in the order in which a run has them.")
]
Cache = Annotated[Path | None, typer.Option("--cache", help="Where fetched shards are kept; needed for a remote.")]
_MAX_ASKED_BYTES = 1 << 24


def index_subjects_of(
    data: DataSets,
    field: Annotated[list[str], typer.Option("--field", help="Field that says whose a row is; again for more.")],
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The index's key; drawn if the file isn't there.")],
    index: IndexFile = None,
    cache: Cache = None,
) -> None:
    """Write an index of whose rows are whose, which only who has its key can ask. All rows are read once.

    The key is a file for its owner alone (mode 0600). Keep it away from the data, the index and the ledger. Without it
    the index shows the names of the fields, and how many rows name somebody, up to 12 %.

    \b
    Example:
      cosmati data index-subjects posts --field author_id --field mentions --key ~/keys/posts.key
    """  # noqa: D301
    for one in data:
        if key.resolve().is_relative_to(Path(one).resolve()):
            raise DataError(f"The key {key} would lie in the data {one}, and go where they go. Keep it elsewhere.")
    dataset = StreamingDataset(data, cache=cache)
    secret = read_key(key) if key.exists() else make_key(key)
    with ProgressDisplay("indexing") as progress:
        made = index_subjects(dataset, field, index_of(key, index), secret, on_share=progress.update)
    typer.echo(f"{made.num_subjects:,} subjects in {made.num_rows:,} rows; {made.num_unnamed:,} name nobody")
    say_without(made.without)
    typer.echo(f"Ask it:   cosmati data find {' '.join(data)} --subject ID --key {key}")


def find(
    data: DataSets,
    subject: Annotated[
        str | None, typer.Option(metavar="ID", help="Whose rows; `-` reads the id from standard input.")
    ] = None,
    key: IndexKey = None,
    index: IndexFile = None,
    like: Annotated[
        list[Path] | None, typer.Option("--like", metavar="FILE", help="Rows like this text or image; again for more.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Likeness at least: of text 0.8, of images 0.9 if left out.")
    ] = None,
    column: Annotated[str, typer.Option(help="Column to compare: `text`, or `image`, if left out.")] = "",
    rows_to: Annotated[
        Path | None, typer.Option("--rows-to", metavar="FILE", help="Write the ids that a deletion takes, one a line.")
    ] = None,
    cache: Cache = None,
) -> None:
    """Say whether a person's rows are in the data, or rows like a file. Exits with 1 if nothing is found.

    By subject an index is asked. By likeness every row is read: text by its shingles of nine characters (Jaccard's
    likeness), images by 64 bits of their shape. A file that's a small part of a row isn't like it.

    \b
    Examples:
      cosmati data find posts --subject 4711 --key ~/keys/posts.key
      cosmati data find corpus --like letter.txt --threshold 0.6
      cosmati data find photos --like me.jpg --rows-to rows.txt
    """  # noqa: D301
    if (subject is None) == (not like):
        raise DataError("Ask for --subject ID with its --key, or for rows --like FILE: one of these.")
    if subject is not None and key is None:
        raise DataError("Whose rows are whose says an index, with its key: give --key FILE, from index-subjects.")
    dataset = StreamingDataset(data, cache=cache)
    if subject is not None and key is not None:
        who = sys.stdin.readline() if subject == "-" else subject
        opened = SubjectIndex.open(index_of(key, index), read_key(key), dataset)
        theirs = opened.find(who)
        whole, documents = theirs.row_ids.tolist(), theirs.documents[:, 1].tolist()
        _say_subject(dataset, theirs)
        say_without(opened.without)
    else:
        with ProgressDisplay("comparing") as progress:
            found = _like(dataset, like or [], threshold, column, progress.update)
        for name, rows in found.items():
            for one in rows:
                what = f"row {one.row_id}" + ("" if one.document is None else f", document {one.document}")
                typer.echo(f"{one.similarity:.3f}  {what}  {one.class_path}  {one.source}  like {name}")
        likenesses = [one for rows in found.values() for one in rows]
        whole = [one.row_id for one in likenesses if one.document is None]
        documents = [one.document for one in likenesses if one.document is not None]
    if rows_to is not None:
        # A number alone would be taken for a pack's by a run that reads packs as rows.
        line = '{{"document": {}}}\n' if documents else "{}\n"
        rows_to.write_text("".join(map(line.format, ids_to_delete(whole, documents))), "utf-8")
    if not whole and not documents:
        typer.echo("None.")
        raise typer.Exit(1)


def say_without(classes: tuple[str, ...]) -> None:
    """Say whose rows an index doesn't know."""
    if classes:
        typer.echo(f"not covered, since they have none of the fields: {', '.join(classes)}")


def _say_subject(dataset: StreamingDataset, found: ChosenRows) -> None:
    for row_id in found.row_ids.tolist():
        source, row = dataset.where(row_id)
        typer.echo(f"row {row_id}  {source.class_path}  {source.url}, its row {row}")
    for pack, document in found.documents.tolist():
        source, row = dataset.where(pack)
        typer.echo(f"document {document} in pack {pack}  {source.class_path}  {source.url}, its row {row}")


def _like(
    dataset: StreamingDataset, files: list[Path], threshold: float | None, column: str, on_share: OnShare
) -> dict[str, list[Likeness]]:
    content = dict[str, bytes]()
    for file in files:
        try:
            if file.stat().st_size > _MAX_ASKED_BYTES:
                raise DataError(f"{file} is larger than {_MAX_ASKED_BYTES >> 20} MB. Ask for a part of it.")
            content[str(file)] = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} can't be read: {error}. Name another file.") from error
    of_images, of_text = (own if threshold is None else threshold for own in (IMAGE_THRESHOLD, TEXT_THRESHOLD))
    images = {name: data for name, data in content.items() if name.lower().endswith(IMAGE_SUFFIXES)}
    found: dict[str, list[Likeness]] = {}
    if images:
        found |= like_image(dataset, images, threshold=of_images, column=column or "image", on_share=on_share)
    texts = dict[str, str]()
    for name, data in content.items():
        if name not in images:
            try:
                texts[name] = data.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                msg = f"{name} is neither text in UTF-8 nor named as an image ({', '.join(IMAGE_SUFFIXES[:4])}, ...)."
                raise DataError(f"{msg} Convert it, or name it by its kind.") from error
    if texts:
        found |= like_text(dataset, texts, threshold=of_text, column=column or "text", on_share=on_share)
    return found
