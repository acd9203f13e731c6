"""A region that no row of the data may teach, though the policy lets other classes do so, is told before the run."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cosmati import InMemory, RunConfig, Trainer, load_policy
from cosmati.core.loss import Classification
from cosmati.errors import PolicyError
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.starvation import starved
from tests.routing.samples import CLASSES, PHASES, REGIONS, compiled

WEIGHTS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=16, max_size=16)


@pytest.mark.long
@given(WEIGHTS, st.sets(st.sampled_from(range(len(CLASSES)))))
def test_a_region_is_starved_where_only_absent_classes_may_teach_it(weights: list[float], there: set[int]) -> None:
    cells = dict(zip(product(CLASSES, REGIONS, PHASES), weights, strict=True))
    rules: list[dict[str, object]] = [
        {"class": c, "region": r, "phase": p, "weight": weight} for (c, r, p), weight in cells.items() if weight
    ]
    own = {CLASSES[c] for c in there}
    expected = {
        (region, phase)
        for region, phase in product(REGIONS, PHASES)
        if any(cells[c, region, phase] for c in CLASSES) and not any(cells[c, region, phase] for c in own)
    }
    assert set(starved(compiled(rules), [(c, 0) for c in there])) == expected


TEXT = """
version: 1
taxonomy: t
regions: {near: {params: ['0.*']}, far: {params: ['2.*']}}
rules:
  - {class: here, region: far, weight: 1}
  - {class: there, region: near, weight: 1}
"""


def trainer(more: str) -> Trainer:
    rows = torch.randn(16, 4), torch.arange(16) % 3
    given: dict[str, Any] = {
        "optimizers": SGD(lr=0.1),
        "policy": load_policy(TEXT + more),
        "taxonomy": Taxonomy("t", "1", (("here", ""), ("there", ""))),
        "config": RunConfig(budget="2ba", num_threads=1, num_microbatches=2),
    }
    data = InMemory(rows, 16, torch.zeros(16, dtype=torch.long), ("here",))
    return Trainer(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), Classification(3), data, **given)


def test_starvation_alarms_or_stops_and_raises_no_weight() -> None:
    with pytest.warns(UserWarning, match=r"no rows that may teach near in phase main"):
        run = trainer("")
    before = run.model[0].weight.detach().clone()  # type: ignore[index, union-attr]
    run.fit()
    assert torch.equal(run.model[0].weight, before)  # type: ignore[index, union-attr, arg-type]
    with pytest.raises(PolicyError, match=r"near in phase main.*leave out `starvation: stop`"):
        trainer("starvation: stop\n")


def test_what_is_said_of_starvation_is_signed() -> None:
    assert load_policy(TEXT).digest == load_policy(f"{TEXT}starvation: alarm\n").digest
    assert load_policy(TEXT).digest != load_policy(f"{TEXT}starvation: stop\n").digest
