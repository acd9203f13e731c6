"""What a ledger's quick answers have to be: the same as by its entries, read one by one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from cosmati.errors import RefutedError
from cosmati.ledger.derived.answers import num_standing, taught
from cosmati.ledger.derived.opened import open_derived
from cosmati.ledger.query import VerifiedLedger, contributions, direct_write_exclusion, direct_write_exclusions
from cosmati.ledger.step_details import learnt_weights, read_norms
from cosmati.records.joint_classes import members_of
from cosmati.storage.duck import has_duckdb


def written_by_entries(ledger: VerifiedLedger) -> set[tuple[str, str]]:
    """Return which class ever wrote into which region: with a weight above 0, or with a gradient."""
    found = set[tuple[str, str]]()
    for item, entry, tables in ledger.steps():
        norms = read_norms(item, len(entry.microbatches), len(tables.regions))
        weights = learnt_weights(item, entry, len(tables.regions))
        for number, cell in enumerate(entry.microbatches):
            name = tables.class_of(cell, item)
            for column, (region, rho) in enumerate(zip(tables.regions, tables.route(cell, item), strict=True)):
                if (rho > 0 and weights[number][column]) or (number in norms and norms[number][column]):
                    found |= {(own, region) for own in (name, *members_of(name))}
    return found


def check_answers(directory: Path) -> None:
    """Compare each quick answer about a ledger with that by its entries."""
    ledger = VerifiedLedger(directory)
    wrote = written_by_entries(ledger)
    pairs = [(name, region) for name in ledger.classes for region in ledger.regions]
    for name, region in pairs:
        if (name, region) in wrote:
            with pytest.raises(RefutedError, match="The statement is false"):
                direct_write_exclusion(directory, name, region)
    stated = direct_write_exclusions(directory, [pair for pair in pairs if pair not in wrote])
    num_steps = sum(1 for _ in ledger.steps())
    assert {one.num_steps_scanned for one in stated} <= {num_steps}
    if not has_duckdb():
        return
    table = contributions(ledger)
    with open_derived(directory) as derived:
        assert num_standing(derived) == table.num_steps
        told = [asdict(one.contribution) for one in taught(derived)]
    assert len(told) == len(table.cells)
    for found, plain in zip(told, map(asdict, table.cells), strict=True):
        assert {k: v if isinstance(v, str | None) else pytest.approx(v) for k, v in plain.items()} == found
