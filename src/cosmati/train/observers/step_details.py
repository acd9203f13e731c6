"""What the ledger's details say of a step beside its cells."""

from __future__ import annotations

import math

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
    """Return the details of a step: norms, loss, what was left out."""
    norms = (
        {}
        if outcome.norms is None
        else {str(m): [finite(v) for v in row] for m, row in enumerate(outcome.norms.tolist())}
    )
    update = None if outcome.update_norms is None else [finite(v) for v in outcome.update_norms.tolist()]
    return {
        "step": step,
        "gradient_norm": norms,
        "update_norm": update,
        "loss": finite(float(outcome.loss)),
        **_sub_steps(outcome, num_regions),
        **({"left_out": outcome.left_out} if outcome.left_out else {}),
    }


def finite(value: float) -> float | None:
    """Return what JSON can hold of a number: None where it isn't finite."""
    return value if math.isfinite(value) else None
