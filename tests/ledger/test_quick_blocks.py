"""Steps in which nothing was taught are taken as quickly as others, unless a class of theirs was to stop the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmati.ledger.columns import _fit_tables


@pytest.mark.parametrize(
    ("action", "stops_at", "fits"), [("stop", 8, False), ("stop", 7, False), ("stop", 9, True), ("reject", 7, True)]
)
def test_steps_without_cells_fit_any_tables_until_the_run_was_to_stop(action: str, stops_at: int, fits: bool) -> None:
    tables = SimpleNamespace(withdrawn=(SimpleNamespace(action=action, step=stops_at),))
    block: Any = SimpleNamespace(tables=tables, cells=np.empty(0), step=6, data=[b""] * 3)
    assert _fit_tables(block) is fits
