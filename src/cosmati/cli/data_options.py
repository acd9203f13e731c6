"""What `cosmati data write` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.data.ingest import Kind

ReadKind = Annotated[
    Kind | None,
    typer.Option(help="What the inputs are; their names tell, if not given. `packages` is this machine's Python."),
]
Replace = Annotated[
    bool, typer.Option("--replace", help="Write all of the classes anew; what is there stays until they're whole.")
]
LabelsOf = Annotated[
    Path | None, typer.Option(metavar="DATASET", help="Images: number the labels as this data set does.")
]
TextField = Annotated[str, typer.Option(help="JSON Lines, Parquet: the field of text to pack; `text` if not given.")]
Words = list[str] | None
By = Annotated[
    Words,
    typer.Option(
        "--by", metavar="FIELD=ID", help="Who made the rows: annotator=, label_function=, rater=; repeatable."
    ),
]
ByField = Annotated[
    Words,
    typer.Option(
        "--by-field", metavar="FIELD=NAME", help="JSON Lines, Parquet: the same by a field of each row; repeatable."
    ),
]
Grade = Annotated[
    Words,
    typer.Option(
        "--grade", metavar="MEASURE=GRADE", help="What was measured of all rows: evidence=trial, say; repeatable."
    ),
]
GradeField = Annotated[
    Words,
    typer.Option(
        "--grade-field",
        metavar="MEASURE=NAME",
        help="JSON Lines, Parquet: the same by a field of each row; repeatable.",
    ),
]
Also = Annotated[
    Words, typer.Option("--also", metavar="CLASS", help="Another class of all rows, which only lowers; repeatable.")
]
AlsoField = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="JSON Lines, Parquet: the field that holds each row's other class, or a list of them."
    ),
]
Policy = Annotated[
    Path | None,
    typer.Option("--policy", help="The policy file whose grades, bands and thresholds --grade and --grade-field mean."),
]
