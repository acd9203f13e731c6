"""Data sets: a source for each class, kind of rows and write, and what each write committed to.

    sources.json           the sources, by path and class: what readers read
    writes.jsonl           what was written from which inputs, under which facts; the owner's
    open/permissive/       a source, open/permissive.2/ one that was appended, took its place, or is of another kind

Rows keep what they were written with. A write of other inputs or facts never touches an earlier one's source: it has
one of its own, and `sources.json` changes at the end, at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cosmati.data.graded import SourceKind
from cosmati.data.ingest.rows import KindOf, Rows
from cosmati.data.shards.appended import digests_of_files, records_of
from cosmati.data.shards.commitment import Commitment, uncompressed_name
from cosmati.data.shards.journal import Journal, first_entry, noted_entries
from cosmati.data.shards.manifest import MANIFEST_FILE, SALT_FILE, SourceFacts, SourceManifest
from cosmati.data.shards.sources import SOURCES_FILE, listed_sources
from cosmati.data.shards.upload import Destination
from cosmati.data.shards.writer import JOURNAL_FILE, ShardWriter
from cosmati.errors import DataError

WRITES_FILE = "writes.jsonl"
WriteMode = Literal["new", "append", "replace"]
_MAX_BYTES = 1 << 28
_SHARD_FILE = re.compile(r"shard\.\d{5,}\.mds(\.[a-z0-9]+)?")


def write_dataset(
    rows: Iterable[Mapping[str, Any]],
    out: Path | str | Destination,
    columns: Mapping[str, str],
    *,
    class_of: Callable[[Mapping[str, Any]], str] | str,
    source: str,
    kind_of: KindOf | None = None,
    facts: SourceFacts | None = None,
    inputs: Mapping[str, str] | None = None,
    reading: Mapping[str, str] | None = None,
    mode: WriteMode = "new",
    on_row: Callable[[int], None] = lambda _number: None,
    **options: Any,  # noqa: ANN401  (ShardWriter's own)
) -> list[SourceManifest]:
    """Write rows of several classes and kinds: a source for each, and `sources.json`, which names them.

    The directory notes what its rows were read from, and all that is said of them. After a crash, call it again with
    the same: finished shards are compared with what the rows give now, and kept. Classes that others write there stay.

    Args:
        rows: in any order.
        out: directory of the data set, or a `Destination` that may be remote.
        columns: encodings of the columns by name.
        class_of: class path of a row, or of all.
        source: name of the sources; of a class's second one `NAME.2`, and so on, since each is signed by its name.
        kind_of: gives what was measured of a row, rows of each kind being a source; None takes that of a reader's
            `Rows`. Where that's None too, `band`, `grades` and `also` of the options are those of all rows.
        facts: where the data come from.
        inputs: SHA-256 in hex of what the rows are read from, by name; None takes those of a reader's `Rows`.
        reading: what else makes the rows what they are, such as the kind of the inputs: names and values.
        mode: `new` is refused where other inputs or facts were written before; `append` writes new inputs beside what
            is there, under facts of their own; `replace` puts the classes that it writes in place of what was there of
            them, once they're whole.
        on_row: told how many rows went by.
        options: of `ShardWriter`.

    Returns:
        The manifests of the sources that were written, by class and kind.

    Raises:
        DataError: inputs or facts aren't those of before, and the message names what differs; or an input changed while
            it was read.
    """
    if inputs is None:
        inputs = rows.inputs() if isinstance(rows, Rows) else {}
    kind_of = (rows.kind_of if isinstance(rows, Rows) else None) if kind_of is None else kind_of
    if kind_of is not None and (twice := sorted({*SourceKind._fields} & {*options})):
        raise DataError(f"{', '.join(twice)} of all rows is said, and of each row too. Say it once.")
    of_all = SourceKind.of_journal(options)
    if isinstance(rows, Rows) and rows.packed:
        options = {"packed": rows.packed, **options}
    if mode == "append" and not inputs:
        raise DataError("Name inputs= to append: without them a second run can't be told from new rows.")
    said = {"source": source, **({"class": class_of} if isinstance(class_of, str) else {}), **(reading or {})}
    labels = rows.label_names if isinstance(rows, Rows) else {}
    place = out if isinstance(out, Destination) else Destination(str(out))
    data_set = _DataSet(place, Commitment(inputs, facts or SourceFacts(), said), mode, labels)
    writers: dict[tuple[str, SourceKind], ShardWriter] = {}
    paths: dict[str, str] = {}
    try:
        for number, row in enumerate(rows, 1):
            class_path = class_of if isinstance(class_of, str) else class_of(row)
            key = class_path, of_all if kind_of is None else kind_of(row)
            if key not in writers:
                writers[key], path = data_set.writer(*key, columns, source=source, **options)
                paths[path] = class_path
            data_set.refuse_known(row)
            writers[key].write(row)
            on_row(number)
        if not writers:
            raise DataError("There is no row to write.")
        _check_unchanged(rows, inputs)
        manifests = [writers[key].finish() for key in sorted(writers)]
        data_set.publish(paths, writers.values())
    finally:
        for writer in writers.values():
            writer.close()
    return manifests


def noted_labels(out: Destination, *, column: str = "label") -> tuple[str, ...]:
    """Return the names of a data set's labels by number, as earlier writes have noted them."""
    entries = noted_entries(out.here / WRITES_FILE)
    return max((tuple(entry["labels"].get(column, ())) for entry in entries), key=len, default=())


def _check_unchanged(rows: object, inputs: Mapping[str, str]) -> None:
    for file in rows.files if isinstance(rows, Rows) else ():
        if inputs.get(file.name, file.sha256) != file.sha256:
            raise DataError(
                f"{file.name} changed while it was read, so its rows may be of two versions. Leave it alone, and write "
                "again with replace."
            )


class _DataSet:
    """A data set as one write sees it."""

    def __init__(
        self, place: Destination, commitment: Commitment, mode: WriteMode, labels: Mapping[str, Sequence[str]]
    ) -> None:
        if mode not in ("new", "append", "replace"):
            raise DataError(f"mode={mode!r} is none of new, append, replace.")
        self._place, self._target, self._here = place, place.target, place.here
        self._url = place.target.url if place.keep else ""  # a local directory may be moved
        self._commitment, self._digest = commitment, commitment.digest
        self._mode = mode
        self._watched: dict[str, tuple[Commitment, set[str], set[bytes]]] = {}
        self._refused: dict[str, DataError] = {}
        with self._locked() as journal:
            known = self._known(journal, labels)
            listed = [entry["path"] for entry in listed_sources(self._target) or ()]
            unknown = sorted({*listed} - self._begun().keys()) if place.keep else []
            if unknown:
                raise DataError(
                    f"{self._target.url} has {unknown[0]}, of which {self._here} knows nothing: what its rows came "
                    "with was kept elsewhere. Name that directory with keep=, --keep, or write to another place."
                )
            if mode != "replace":
                self._refuse_shared(known, listed)
            if self._digest not in known:
                named = {column: list(names) for column, names in labels.items()}
                journal.note({"url": self._url, "commitment": commitment.to_json(), "labels": named})
            before = {path: known[digest] for path, digest in self._begun().items() if digest in known}
        for path in listed:
            goes = mode == "replace" and _class_of(path) == commitment.reading.get("class")
            if path in before and before[path].digest != self._digest and not goes:
                self._watch(path, before[path])

    def _watch(self, path: str, before: Commitment) -> None:
        """Note a source's records of inputs that came back with other bytes."""
        renewed = self._commitment.renewed(before)
        if not renewed:
            return
        names = {uncompressed_name(name) for name in renewed}
        digests = digests_of_files(self._place.below(path).target, names)
        if digests is None:
            self._refuse(path, before, f"has rows of {renewed[0]} already, as it was then")
        else:
            self._watched[path] = (before, names, digests)

    def refuse_known(self, row: Mapping[str, Any]) -> None:
        """Refuse a row that a source has already from the same input when that had other bytes."""
        if not self._watched:
            return
        records = records_of(row)
        for path, (before, names, digests) in self._watched.items():
            if not records:
                self._refuse(path, before, f"has rows of {min(names)} already, as it was then")
            for file, place, digest in records:
                if digest in digests and uncompressed_name(file) in names:
                    self._refuse(path, before, f"has the row of {file}, {place}, already")

    def _refuse(self, path: str, before: Commitment, what: str) -> None:
        """Refuse now; or at the end, if the source is still there then, where it may be replaced."""
        error = self._refusal(path, before, what)
        if self._mode != "replace":
            raise error
        self._refused.setdefault(path, error)

    def _locked(self) -> Journal:
        return Journal(self._here / WRITES_FILE, wait=True)

    def _known(self, journal: Journal, labels: Mapping[str, Sequence[str]] | None = None) -> dict[str, Commitment]:
        """Return every commitment that was noted, by digest; refuse labels that have other numbers there."""
        known = {}
        for entry in journal.entries():
            for column, names in (labels or {}).items():
                both = zip(entry["labels"].get(column, ()), names, strict=False)
                other = next((f"{there!r} there and {here!r} here" for there, here in both if there != here), None)
                if other:
                    raise DataError(f"A number of {column!r} means {other}, in {self._here}. Read with label_names=.")
            if entry["url"] != self._url:
                msg = f"{self._here} keeps what belongs to {entry['url'] or 'itself'}. Name another directory for"
                raise DataError(f"{msg} {self._target.url}.")
            found = Commitment.from_json(entry["commitment"])
            known[found.digest] = found
        return known

    def _begun(self) -> dict[str, str]:
        """Return the commitments of all sources that were begun, by path."""
        found = {}
        for journal in sorted(self._here.rglob(JOURNAL_FILE)):
            path, entry = journal.parent.relative_to(self._here).as_posix(), first_entry(journal)
            # Without an entry nothing was begun; of another class it's somebody's copy.
            if entry is not None and entry["class_path"] == _class_of(path):
                found[path] = str(entry.get("commitment") or "")
        return found

    def _refuse_shared(self, known: Mapping[str, Commitment], paths: Iterable[str]) -> None:
        """Refuse inputs whose rows are in a source of another commitment: a row would have two licences, or classes."""
        sources = self._begun()
        for path in paths:
            digest = sources.get(path, "")
            before = known.get(digest)
            shared = self._commitment.shared(before) if before is not None and digest != self._digest else []
            if before is not None and shared:
                raise self._refusal(path, before, f"has rows of {shared[0]} already")

    def _refusal(self, path: str, before: Commitment | None, what: str) -> DataError:
        found = "; ".join(self._commitment.differences(before)) if before else "nothing here says what it's from"
        mend = {
            "new": "Write what was written before to go on with it; --append adds new inputs under facts of their own, "
            "--replace writes the class anew (mode= in Python).",
            "append": "Name new inputs only, or --replace the class.",
            "replace": "Replace that class too, or write elsewhere.",
        }[self._mode]
        if self._mode == "new" and before is not None and self._commitment.renewed(before):
            mend = "Write what was written before to go on with it; --replace writes the class anew (mode= in Python)."
        return DataError(f"{self._target.url}/{path} {what}, and rows keep what they came with: {found}. {mend}")

    def writer(
        self,
        class_path: str,
        kind: SourceKind,
        columns: Mapping[str, str],
        *,
        source: str,
        **options: Any,  # noqa: ANN401  (ShardWriter's own)
    ) -> tuple[ShardWriter, str]:
        """Return the writer of a class's kind, at its path: where this write was broken off, or one that is free."""
        with self._locked() as journal:
            named = [str(entry["path"]) for entry in listed_sources(self._target) or () if entry["class"] == class_path]
            sources = self._begun()
            mine = [path for path in sources if _class_of(path) == class_path]
            for path in [path for path in mine if path not in named and sources[path] != self._digest]:
                if self._is_empty(path):
                    self._remove(path)
                    mine.remove(path)
            taken = sorted({*named, *mine}, key=_place)
            own = [path for path in mine if sources[path] == self._digest]
            if self._mode == "replace":
                own = [path for path in own if path not in named]
            if self._mode == "new" and named and not {*own} & {*named}:
                own = []  # what is left of a write whose place another has taken
            if self._mode == "new" and taken and not own:
                one = max(named or taken, key=_place)
                raise self._refusal(one, self._known(journal).get(sources.get(one, "")), "was begun already")
            begun = {path: first_entry(self._here / path / JOURNAL_FILE) or {} for path in own}
            same = [path for path, entry in begun.items() if SourceKind.of_journal(entry) == kind]
            free = next(path for n in range(1, len(taken) + 2) if (path := _path(class_path, n)) not in taken)
            path = max(same, key=lambda one: (one in named, _place(one))) if same else free
            number = _place(path)[1]
            name = begun[path]["source"] if same else source if number == 1 else f"{source}.{number}"
            writer = ShardWriter(
                self._place.below(path),
                columns,
                class_path=class_path,
                source=name,
                **{**options, "band": kind.band, "grades": dict(kind.grades), "also": kind.also},
                facts=self._commitment.facts,
                commitment=self._digest,
            )
            return writer, path

    def _is_empty(self, path: str) -> bool:
        """Whether a source has no shard, and nobody is writing one."""
        try:
            with Journal(self._here / path / JOURNAL_FILE) as journal:
                return sum(1 for _ in journal.entries()) < 2
        except BlockingIOError:
            return False

    def publish(self, paths: Mapping[str, str], writers: Iterable[ShardWriter]) -> None:
        """Name the sources of this write in `sources.json` beside the others, or in place of those of their classes.

        Those that are refused, since another write was there first, are removed.
        """
        with self._locked() as journal:
            listed = listed_sources(self._target) or []
            classes = {*paths.values()} if self._mode == "replace" else set()
            gone = [entry["path"] for entry in listed if entry["class"] in classes and entry["path"] not in paths]
            entries = {entry["path"]: entry for entry in listed if entry["path"] not in gone}
            try:
                self._refuse_shared(self._known(journal), entries)
                for path in self._refused.keys() & entries.keys():
                    raise self._refused[path]
            except DataError:
                for writer in writers:
                    writer.close()
                for path in paths.keys() - {entry["path"] for entry in listed}:
                    self._remove(path)
                raise
            for path, class_path in paths.items():
                index = self._target.read(f"{path}/index.json", max_bytes=_MAX_BYTES)
                entries[path] = {
                    "path": path,
                    "class": class_path,
                    "index_sha256": hashlib.sha256(index).hexdigest(),
                }
            ordered = sorted(entries.values(), key=lambda entry: _place(entry["path"]))
            self._target.put(SOURCES_FILE, json.dumps({"version": 1, "sources": ordered}, indent=1).encode())
            if self._mode == "replace":
                for path in {*gone, *self._outdated(journal, classes)} - entries.keys():
                    self._remove(path)

    def _outdated(self, journal: Journal, classes: Collection[str]) -> Iterator[str]:
        """Yield sources that were begun of the classes, or from these inputs."""
        known = self._known(journal)
        for path, digest in self._begun().items():
            before = known.get(digest)
            if _class_of(path) in classes or (before is not None and self._commitment.shared(before)):
                yield path

    def _remove(self, path: str) -> None:
        """Remove a source that nobody names any more; one that another process writes stays."""
        here = self._here / path
        try:
            journal = Journal(here / JOURNAL_FILE)
        except BlockingIOError:
            return
        with journal:
            source = self._place.below(path).target
            source.remove(["index.json", MANIFEST_FILE])
            # Before the shards: who has no journal begins anew, and doesn't count on what is gone.
            (here / JOURNAL_FILE).unlink(missing_ok=True)
            source.remove([*filter(_SHARD_FILE.fullmatch, source.names("*"))])
            (here / SALT_FILE).unlink(missing_ok=True)
        while here != self._here and not any(here.iterdir()):
            here.rmdir()
            here = here.parent


def _path(class_path: str, number: int) -> str:
    return class_path if number == 1 else f"{class_path}.{number}"


def _place(path: str) -> tuple[str, int]:
    """Return class path and number of a source's path; a class path holds no dot."""
    class_path, _, number = path.rpartition(".")
    return (class_path, int(number)) if class_path and number.isdecimal() else (path, 1)


def _class_of(path: str) -> str:
    return _place(path)[0]
