"""What the ledger's details say of a step beside its cells."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from cosmati.core.batch import TOMBSTONE
from cosmati.train.outcome import StepOutcome


def places_of(given: Tensor, kept: Tensor, width: int) -> list[int]:
    """Say of each row of a microbatch at which place it was kept, from 1; 0 where it wasn't, and -1 up to a width.

    A row that was given twice may be kept once: each place is one row's.
    """
    places: dict[int, list[int]] = {}
    for place, row in reversed(list(enumerate(kept.tolist(), 1))):
        places.setdefault(row, []).append(place)
    places.pop(TOMBSTONE, None)
    found = [places[row].pop() if places.get(row) else 0 for row in given.tolist()]
    return found + [-1] * (width - len(found))


def kept_details(places: Tensor) -> dict[str, object]:
    """Say which slots were kept where not all were: nobody could tell without the model of that step."""
    kept = {
        str(m): sorted((row > 0).nonzero().flatten().tolist(), key=row.tolist().__getitem__)
        for m, row in enumerate(places)
        if not bool(row.all())  # -1 is no row
    }
    return {"kept_rows": kept} if kept else {}


def _sub_steps(outcome: StepOutcome, num_regions: int) -> dict[str, object]:
    """Say what each sub-step taught, where that isn't every region by the cell's weight."""
    if len(outcome.taught) < 2 and all(len(one.regions) == num_regions for one in outcome.taught):
        return {}
    told = [{"regions": list(one.regions), "weights": one.weights.tolist()} for one in outcome.taught]
    return {"sub_steps": told}


def step_details(outcome: StepOutcome, step: int, num_regions: int) -> dict[str, object]:
    """Return the details of a step but for the columns of its cells: loss, update, digests, what was left out."""
    update = None if outcome.update_norms is None else [finite(v) for v in outcome.update_norms.tolist()]
    told: dict[str, object] = {"step": step, "update_norm": update, "loss": finite(float(outcome.loss))}
    if outcome.update_norms is not None and outcome.update_sketches is not None:
        told["update_direction"] = _directions(outcome.update_sketches, outcome.update_norms)
    if outcome.digests is not None:
        told["region_digests"] = {
            when: [one.hex() for one in digests] for when, digests in outcome.digests._asdict().items()
        }
    return told | _sub_steps(outcome, num_regions) | ({"left_out": outcome.left_out} if outcome.left_out else {})


def _columns_of(outcome: StepOutcome) -> dict[str, list[list[Any]]]:
    """Return what was measured of each microbatch: by name of the column, a value for each region."""
    found: dict[str, list[list[Any]]] = {}
    if outcome.norms is not None:
        found["gradient_norm"] = [[finite(v) for v in row] for row in outcome.norms.tolist()]
        if outcome.sketches is not None:
            found["direction"] = list(map(_directions, outcome.sketches, outcome.norms))
    if outcome.entropies is not None:
        found["entropy"] = [[finite(v) for v in row] for row in outcome.entropies.tolist()]
    return found


def written_columns(outcome: StepOutcome, owners: Sequence[int]) -> dict[str, Any]:
    """Return the columns of a step as its details have them, by cell: the one place where a class's are written.

    Those of a microbatch of several classes are of no class: they go under names of their own, by microbatch.

    Args:
        outcome: of the step.
        owners: microbatch of each cell.
    """
    told: dict[str, Any] = {"gradient_norm": {}}
    for name, rows in _columns_of(outcome).items():
        told[name] = {str(cell): rows[m] for cell, m in enumerate(owners) if owners.count(m) == 1}
        if apart := {str(m): row for m, row in enumerate(rows) if owners.count(m) != 1}:
            told[f"packed_{name}"] = apart
    return told


def _directions(sketches: Tensor, norms: Tensor) -> list[str | None]:
    """Return sketches of directions as text: 16 numbers of float16, little-endian, in base64; None where there's none.

    Args:
        sketches: [regions, 16].
        norms: of what was sketched [regions].
    """
    scaled = (sketches.double() / norms.double()[:, None]).cpu().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = scaled.astype("<f2")
    return [b64encode(row.tobytes()).decode() if np.isfinite(row).all() else None for row in narrow]


def finite(value: float) -> float | None:
    """Return what JSON can hold of a number: None where it isn't finite."""
    return value if math.isfinite(value) else None
