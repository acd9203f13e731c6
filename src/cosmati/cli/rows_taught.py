"""`cosmati ledger query --by`, which needs PyTorch and the run's recipe, as nothing else there does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import typer

from cosmati.cli.files import load_recipe
from cosmati.cli.ledger_queries import words_of_spans
from cosmati.data.named_rows import read_ids, rows_where, rows_with_ids
from cosmati.data.people import ChosenRows
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import LedgerError
from cosmati.ledger.derived.answers import spans_of
from cosmati.ledger.verify import LEVEL_0
from cosmati.train.rows_taught import regions_taught_by

_MAX_AROUND = 8


def say_rows_taught(
    run: Path, by: str, recipe: str, vkey: str | None, rows_of_subject: Callable[[str], Iterable[int]] | None = None
) -> None:
    """Print which regions some rows taught, and at which steps.

    Args:
        run: the run's folder.
        by: which rows: `annotator=ID` and the like, `row=ID`, `rows=FILE`, `subject=ID`, or a column of the data.
        recipe: what the run was made from.
        vkey: the operator's verifier key from a source that you trust.
        rows_of_subject: ids of a subject's rows, from an index of subjects.

    Raises:
        LedgerError: the recipe's data aren't streamed, or aren't those of the run.
        DataError: the data have no such field or rows.
    """
    made = load_recipe(recipe, [])
    dataset: object = made.data()
    for _ in range(_MAX_AROUND):
        dataset = dataset if isinstance(dataset, StreamingDataset) else getattr(dataset, "dataset", None)
    if not isinstance(dataset, StreamingDataset):
        msg = f"--by reads who has made each row, and the data of {recipe} aren't a StreamingDataset's."
        raise LedgerError(f"{msg} Ask in Python: regions_taught_by(trainer, ChosenRows(row_ids, documents)).")
    found = regions_taught_by(made.trainer(run_folder=run), _chosen(dataset, by, rows_of_subject), vkey=vkey)
    for one in found:
        steps = words_of_spans(spans_of(np.asarray(one.steps, np.int64)))
        unopened = f", {one.num_unopened} microbatches not compared" if one.num_unopened else ""
        typer.echo(f"{one.region:<16}{one.num_rows:>8} rows in {len(one.steps):>6} steps: {steps}{unopened}")
    typer.echo(f"Rows of {by}, each of them at each visit. {LEVEL_0}." if found else f"None of {by} taught anything.")


def _chosen(dataset: StreamingDataset, by: str, rows_of_subject: Callable[[str], Iterable[int]] | None) -> ChosenRows:
    field, equals, value = by.partition("=")
    if not equals:
        raise LedgerError(f"--by {by} doesn't say which rows: write FIELD=ID, such as annotator=ada or row=17.")
    if field == "rows":
        return rows_with_ids(dataset, read_ids(Path(value)))
    if field == "row":
        if not (value.isascii() and value.isdigit() and int(value) < 1 << 63):
            raise LedgerError(f"--by row={value} is no row id. Rows are numbered from 0.")
        return rows_with_ids(dataset, [int(value)])
    if field == "subject":
        if rows_of_subject is None:
            raise LedgerError("Who a row is about is known from an index of subjects alone, and none was given.")
        return rows_with_ids(dataset, rows_of_subject(value))
    return rows_where(dataset, field, value)
