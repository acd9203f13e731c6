"""Rows from the wild: lazy readers that check each row, and say its class and its origin.

    rows = read_jsonl("crawl/", {"text": "str", "licence": "str"}, class_of=class_by_field("licence", {...}))
    for row in rows:  # plain dictionaries, with origin_file, origin_place and origin_sha256
        ...

`rows.columns` and `rows.class_of` are what a writer of shards wants to know. A bad row ends the pass with a
`DataError`, or is left out and listed in `rows.skipped`: never neither.
"""

from __future__ import annotations

from cosmati.data.ingest.hugging_face import read_hugging_face, to_hugging_face
from cosmati.data.ingest.images import decode_image, read_image_folder
from cosmati.data.ingest.jsonl import infer_columns, read_jsonl
from cosmati.data.ingest.kinds import Kind, kind_of_files
from cosmati.data.ingest.parquet import read_parquet
from cosmati.data.ingest.people import PEOPLE, attribute
from cosmati.data.ingest.rows import (
    ORIGIN_COLUMNS,
    ClassOf,
    OnError,
    OriginFile,
    Reading,
    Row,
    Rows,
    SkippedRow,
    class_by_field,
)
from cosmati.data.ingest.text import read_text

__all__ = [
    "ORIGIN_COLUMNS",
    "PEOPLE",
    "ClassOf",
    "Kind",
    "OnError",
    "OriginFile",
    "Reading",
    "Row",
    "Rows",
    "SkippedRow",
    "attribute",
    "class_by_field",
    "decode_image",
    "infer_columns",
    "kind_of_files",
    "read_hugging_face",
    "read_image_folder",
    "read_jsonl",
    "read_parquet",
    "read_text",
    "to_hugging_face",
]
