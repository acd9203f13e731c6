"""`cosmati ledger query --by`, which needs PyTorch and the run's recipe, as nothing else there does."""

from __future__ import annotations

from pathlib import Path

import typer

from cosmati.cli.files import load_recipe
from cosmati.data.people import rows_by
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import LedgerError
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.query import VerifiedLedger
from cosmati.train.rows_taught import regions_taught_by

_MAX_AROUND = 8


def say_rows_taught(run: Path, by: str, recipe: str, vkey: str | None, trusted: TrustedEvidence) -> None:
    """Print which regions somebody's rows taught, and at which steps.

    Raises:
        LedgerError: the recipe's data aren't streamed, or aren't those of the run.
        DataError: the data have no such field.
    """
    field, _, who = by.partition("=")
    made = load_recipe(recipe, [])
    dataset: object = made.data()
    for _ in range(_MAX_AROUND):
        dataset = dataset if isinstance(dataset, StreamingDataset) else getattr(dataset, "dataset", None)
    if not isinstance(dataset, StreamingDataset):
        msg = f"--by reads who has made each row, and the data of {recipe} aren't a StreamingDataset's."
        raise LedgerError(f"{msg} Ask in Python: regions_taught_by(trainer, ChosenRows(row_ids, documents)).")
    found = regions_taught_by(made.trainer(run_folder=run), rows_by(dataset, field, who), vkey=vkey)
    for one in found:
        steps = _spans(one.steps)
        unopened = f", {one.num_unopened} microbatches not compared" if one.num_unopened else ""
        typer.echo(f"{one.region:<16}{one.num_rows:>8} rows in {len(one.steps):>6} steps: {steps}{unopened}")
    level = VerifiedLedger(run / "ledger", vkey, trusted).evidence_level
    typer.echo(f"Rows of {by}, each of them at each visit." if found else f"None of {by} taught anything.")
    typer.echo(f"{level}.")


def _spans(steps: tuple[int, ...]) -> str:
    """Return steps as spans: `0-3, 7`."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
