"""`cosmati ledger query --by`, which needs PyTorch and the run's recipe, as nothing else there does."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import typer

from cosmati.cli.data_find import say_without
from cosmati.cli.files import load_recipe
from cosmati.cli.ledger_taught import words_of_spans
from cosmati.cli.subject_options import index_of
from cosmati.data.named_rows import read_ids, rows_where, rows_with_ids
from cosmati.data.people import ChosenRows
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import LedgerError
from cosmati.forget.subjects import SubjectIndex, read_key
from cosmati.ledger.derived.answers import spans_of
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.query import VerifiedLedger
from cosmati.train.rows_taught import regions_taught_by

_MAX_AROUND = 8


def say_rows_taught(
    run: Path,
    by: str,
    recipe: str,
    vkey: str | None,
    trusted: TrustedEvidence,
    *,
    key: Path | None = None,
    index: Path | None = None,
) -> None:
    """Print which regions some rows taught, and at which steps.

    Args:
        run: the run's folder.
        by: which rows: `annotator=ID` and the like, `row=ID`, `rows=FILE`, `subject=ID`, or a column of the data.
        recipe: what the run was made from.
        vkey: the operator's verifier key from a source that you trust.
        trusted: whom you trust to have seen the ledger.
        key: of the index of subjects, for `subject=ID`.
        index: the index; beside the key where it's left out.

    Raises:
        LedgerError: the recipe's data aren't streamed, or aren't those of the run.
        DataError: the data have no such field or rows, or the index isn't of them.
    """
    field = by.partition("=")[0]
    if (field == "subject") != (key is not None) or (index is not None and key is None):
        msg = "Whose rows are whose says an index, with its key: --by subject=ID --key FILE, and only these together."
        raise LedgerError(f"{msg} Make it: cosmati data index-subjects.")
    made = load_recipe(recipe, [])
    dataset: object = made.data()
    for _ in range(_MAX_AROUND):
        dataset = dataset if isinstance(dataset, StreamingDataset) else getattr(dataset, "dataset", None)
    if not isinstance(dataset, StreamingDataset):
        msg = f"--by reads who has made each row, and the data of {recipe} aren't a StreamingDataset's."
        raise LedgerError(f"{msg} Ask in Python: regions_taught_by(trainer, ChosenRows(row_ids, documents)).")
    if key is not None:
        chosen, by = _of_subject(dataset, by, key, index)
    else:
        chosen = _chosen(dataset, by)
    found = regions_taught_by(made.trainer(run_folder=run), chosen, vkey=vkey)
    for one in found:
        steps = words_of_spans(spans_of(np.asarray(one.steps, np.int64)))
        unopened = f", {one.num_unopened} microbatches not compared" if one.num_unopened else ""
        typer.echo(f"{one.region:<16}{one.num_rows:>8} rows in {len(one.steps):>6} steps: {steps}{unopened}")
    level = VerifiedLedger(run / "ledger", vkey, trusted).evidence_level
    typer.echo(f"Rows of {by}, each of them at each visit." if found else f"None of {by} taught anything.")
    typer.echo(f"{level}.")


def _of_subject(dataset: StreamingDataset, by: str, key: Path, index: Path | None) -> tuple[ChosenRows, str]:
    """Return the rows that name somebody, and in words whose they are; `-` reads the id from standard input."""
    value = by.partition("=")[2]
    opened = SubjectIndex.open(index_of(key, index), read_key(key), dataset)
    say_without(opened.without)
    is_asked = value == "-"
    return opened.find(sys.stdin.readline() if is_asked else value), "the subject" if is_asked else by


def _chosen(dataset: StreamingDataset, by: str) -> ChosenRows:
    field, equals, value = by.partition("=")
    if not equals:
        raise LedgerError(f"--by {by} doesn't say which rows: write FIELD=ID, such as annotator=ada or row=17.")
    if field == "rows":
        return rows_with_ids(dataset, read_ids(Path(value)))
    if field == "row":
        if not (value.isascii() and value.isdigit() and int(value) < 1 << 63):
            raise LedgerError(f"--by row={value} is no row id. Rows are numbered from 0.")
        return rows_with_ids(dataset, [int(value)])
    return rows_where(dataset, field, value)
