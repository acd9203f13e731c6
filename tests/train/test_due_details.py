"""What is measured of a step's learning, against each cadence by itself."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from cosmati.train.config import RunConfig
from cosmati.train.due_details import NOTHING_DUE, DetailCadences, DueDetails

CADENCES = ("details_every", "direction_every", "update_norm_every", "update_direction_every")
CADENCES += ("digests_every", "entropy_every")


def test_nothing_is_measured_where_nothing_is_due() -> None:
    assert dataclasses.astuple(NOTHING_DUE) == (False, None, False, None, False, False)


NEVER = dict.fromkeys(CADENCES, 0) | {"details_every": 1_000_000, "update_norm_every": 1_000_000}
"""These two are never 0, so that they are due in step 0."""


@pytest.mark.parametrize(("is_governed", "is_offered"), list(product([False, True], repeat=2)))
@pytest.mark.parametrize("own", CADENCES)
@pytest.mark.parametrize("every", [0, 1, 3])
def test_each_figure_is_due_by_its_own_cadence(own: str, every: int, is_governed: bool, is_offered: bool) -> None:
    config = RunConfig(**(NEVER | ({own: every} if every else {})))  # type: ignore[arg-type]
    cadences = DetailCadences(config, is_governed=is_governed)
    assert cadences.need_microbatches == (every > 0 and own in ("digests_every", "entropy_every"))
    for step in range(8):
        due = cadences.due(step, is_offered=is_offered)
        now = every > 0 and step % every == 0
        moves = is_governed and is_offered
        assert due == DueDetails(
            norms=step == 0 or (now and own in ("details_every", "direction_every")),
            sketch=due.sketch,
            update=moves and (step == 0 or (now and own in ("update_norm_every", "update_direction_every"))),
            update_sketch=due.update_sketch,
            digests=now and own == "digests_every",
            entropy=now and own == "entropy_every",
        )
        assert (due.sketch is not None) == (now and own == "direction_every")
        assert (due.update_sketch is not None) == (now and moves and own == "update_direction_every")
