"""A ledger under a policy with bands: each cell is held against the row of its own band."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmati.errors import TamperError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import NO_DETAILS, MicrobatchCell, RunEntry, StepEntry

from .ledgers import digest
from .test_verify import write_signed

ROUTES = [[0.0], [0.5], [1.0]]
DETAILS: dict[str, object] = {
    "classes": ["news"],
    "regions": ["all"],
    "routes": ROUTES,
    "phases": [["main", 0, 400]],
    "bands": ["low", "middle", "high"],
    "policy": [[[[0.0]], ["reject"]], [[[0.5]], ["gate"]], [[[1.0]], ["admit"]]],
}


def write(folder: Path, band: int, route: int, num_rows: int = 2, **changed: object) -> Path:
    details = DETAILS | changed
    commitments = (("data", digest("data")), ("policy", digest("policy")))
    cell = MicrobatchCell(0, band, 0, route, num_rows, float(num_rows), digest("rows"))
    step = StepEntry(0, 0, digest("policy"), NO_DETAILS, None, (cell,))
    write_signed(folder, [(RunEntry("r", commitments, details_digest(details)), details), (step, None)])
    return folder


@pytest.mark.parametrize(("band", "route", "num_rows"), [(0, 0, 0), (1, 1, 2), (2, 2, 2)])
def test_a_cell_goes_by_its_band(tmp_path: Path, band: int, route: int, num_rows: int) -> None:
    assert verify_ledger(write(tmp_path / "ledger", band, route, num_rows)).num_steps == 1
    (tables,) = VerifiedLedger(tmp_path / "ledger").tables
    assert tables.policy_of_classes == ((((1.0,), "admit"),),), "of a class: the most that a band of it may"


@pytest.mark.parametrize(
    ("band", "route", "changed", "why"),
    [
        (1, 2, {}, "gives 'news'"),
        (2, 1, {}, "gives 'news'"),
        (0, 0, {}, "which the policy says to reject"),
        (3, 2, {}, "band 3 isn't in the tables of entry 0"),
        (1, 1, {"bands": ["low", "middle"]}, "for each class, band and phase"),
        (1, 1, {"bands": ["low", "low", "high"]}, "distinct"),
        (1, 1, {"bands": 3}, "distinct"),
    ],
)
def test_a_cell_that_another_band_would_give_is_told(
    tmp_path: Path, band: int, route: int, changed: dict[str, object], why: str
) -> None:
    with pytest.raises(TamperError, match=why):
        verify_ledger(write(tmp_path / "ledger", band, route, **changed))  # type: ignore[arg-type]
