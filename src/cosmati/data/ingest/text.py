"""Text files: a row a file, a line, or whatever a separator ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType

from cosmati.data.ingest.files import MAX_RECORD_BYTES, Paths, file_digests, list_files, read_records
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, ClassOf, OnError, Reading, Row, Rows
from cosmati.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".txt.gz", ".txt.bz2", ".txt.xz", ".txt.zst")


def read_text(
    paths: Paths,
    *,
    class_of: str | ClassOf,
    separator: str | None = None,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    on_error: OnError = "raise",
    max_row_bytes: int = MAX_RECORD_BYTES,
) -> Rows:
    r"""Read UTF-8 text into the column `text`, as it is: no line end is changed, nothing is stripped.

    Text that is empty or all whitespace is no row. A byte order mark at the start of a file is left out.

    Args:
        paths: files, plain or compressed, or directories of them.
        class_of: class path of all rows, or a function of a row.
        separator: ends a row, and isn't part of it: a line's end, a blank line (two line ends), or a mark such as
            `<|endoftext|>`. None makes each file a row.
        suffixes: of the files to take from directories; `[""]` takes all.
        on_error: `raise` at a row that isn't UTF-8 or too long, or leave it out and `record` it in `Rows.skipped`.
        max_row_bytes: a longer row is bad.

    Raises:
        DataError: there are no files, or the separator is empty.
    """
    if separator == "":
        raise DataError("The separator is empty. Give the text that ends a row, or None to make each file a row.")
    files = list_files(paths, suffixes)
    mark = None if separator is None else separator.encode()

    def read(reading: Reading) -> Iterator[Row]:
        for name, file in files:
            for line, record in read_records(name, file, reading, separator=mark, max_bytes=max_row_bytes):
                try:
                    text = record.decode("utf-8")
                except UnicodeDecodeError as error:
                    reading.reject(name, line, f"isn't UTF-8 at byte {error.start} of the row")
                    continue
                text = text.removeprefix("\ufeff") if line == 1 else text
                if text and not text.isspace():
                    sha256 = hashlib.sha256(record).digest()
                    yield {"text": text, "origin_file": name, "origin_place": line, "origin_sha256": sha256}

    columns = MappingProxyType({"text": "str"} | dict(ORIGIN_COLUMNS))
    return Rows(columns, class_of, read, on_error, inputs=partial(file_digests, files))
