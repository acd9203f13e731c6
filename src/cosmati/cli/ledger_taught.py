"""How the answers of `cosmati ledger` to who taught what are printed: for people, or as rows for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import typer

from cosmati.ledger.derived.answers import ClassTaught, StepSpan
from cosmati.ledger.derived.learning import ClassLearning, RegionMoves
from cosmati.ledger.derived.views import RowForm, written
from cosmati.ledger.query import Contribution
from cosmati.ledger.sources import sources_of
from cosmati.ledger.tables import Tables
from cosmati.records.joint_classes import members_of

_MAX_SPANS = 12


def say_taught(chosen: Sequence[ClassTaught], spans: dict[tuple[str, str], tuple[StepSpan, ...]], each: str) -> None:
    """Say what was taught, a line for a class and a region, and at which steps where these are known."""
    group = ""
    for one in chosen:
        cell = one.contribution
        if one.group != group:
            typer.echo(f"{each} {one.group}:")
            group = one.group
        share = "–" if cell.norm_share is None else f"{cell.norm_share:.1%}"
        sealed = (
            f"; {cell.num_sealed} of its {cell.num_norms + cell.num_sealed} norms are sealed" if cell.num_sealed else ""
        )
        when = f" ({one.first_step} to {one.last_step})" if one.first_step >= 0 else ""
        typer.echo(
            f"{cell.class_name:<22}{cell.region:<16}{cell.num_rows:>8} rows in {cell.num_steps:>6} steps{when}, "
            f"{share:>6} of the region's gradient norms{sealed}"
        )
        if found := spans.get((cell.class_name, cell.region)):
            left = len(found) - _MAX_SPANS
            more = f", and {left} more spans: --format json has all" if left > 0 else ""
            typer.echo(f"  steps {words_of_spans(found[:_MAX_SPANS])}{more}")
    if not chosen:
        typer.echo("None.")


def say_learning(of_classes: Sequence[ClassLearning], moves: Sequence[RegionMoves]) -> None:
    """Say what was measured of classes and regions beside norms."""
    for one in of_classes:
        told = []
        if one.num_directions:
            along = "" if one.along_update is None else f", {one.along_update:+.2f} along the step's update"
            told.append(f"{one.num_directions} directions{along}")
        if one.first_entropy is not None:
            told.append(f"entropy {one.first_entropy:.2f} at first, {one.last_entropy:.2f} at last")
        typer.echo(f"{one.class_name:<22}{one.region:<16}{'; '.join(told)}")
    for move in moves:
        told = []
        if move.mean_update is not None:
            told.append(f"{move.num_updates} updates, of norm {move.mean_update:.3g} on average")
        if move.num_digests:
            told.append(f"digests of {move.num_digests} steps")
        if move.broken_after:
            steps = words_of_spans((step, step) for step in move.broken_after)
            told.append(f"CHANGED BETWEEN STEPS, after {steps}")
        typer.echo(f"region {move.region:<31}{'; '.join(told)}")
    if not (of_classes or moves):
        typer.echo("Nothing was measured beside norms: see direction_every, digests_every and entropy_every.")
    typer.echo(
        "Cosines are means over sketches, each off by about 0.25; neither they nor entropies say what had an influence."
    )


def words_of_spans(spans: Iterable[StepSpan]) -> str:
    """Return spans in words: `0-3, 7`."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def say_sources(directory: Path, read_with: Sequence[Tables], chosen: Sequence[ClassTaught]) -> None:
    """Say from which signed sources the classes' rows came, and under which licence."""
    names = {name for one in chosen for name in (one.contribution.class_name, *members_of(one.contribution.class_name))}
    known = dict.fromkeys(one for tables in read_with for one in sources_of(directory, tables))
    for one in known:
        if names & {one.class_name, *members_of(one.class_name)}:
            until = f" until {one.valid_until}" if one.valid_until else ""
            licence = f"licence {one.licence}{until}" if one.licence else "no licence in its manifest"
            origin = f", from {one.origin}" if one.origin else ""
            typer.echo(f"source {one.target}: {licence}{origin}")


def records_of(
    chosen: Sequence[ClassTaught], spans: dict[tuple[str, str], tuple[StepSpan, ...]], said: str
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return columns and rows for programs."""
    columns = ["group", *(field.name for field in fields(Contribution)), "first_step", "last_step", "steps", "said"]
    rows = []
    for one in chosen:
        cell = asdict(one.contribution)
        found = spans.get((one.contribution.class_name, one.contribution.region))
        when = [list(span) for span in found] if found else None
        if one.contribution.num_sealed and not one.contribution.num_norms:
            cell |= {"norm_sum": "sealed", "norm_rms": "sealed", "norm_share": "sealed"}
        rows.append((one.group, *cell.values(), one.first_step, one.last_step, when, said))
    return columns, rows


def say_rows(table: tuple[Sequence[str], Iterable[tuple[Any, ...]]], form: RowForm) -> None:
    """Print columns and rows in a form."""
    names, rows = table
    for line in written(names, iter(rows), form):
        typer.echo(line)
