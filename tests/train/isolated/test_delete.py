"""The delete test: a class present against tombstoned, and every other region in bits."""

from __future__ import annotations

import pytest
import torch

from cosmati.core.batch import Batch, Lineage, bury
from cosmati.data.tombstoned import Tombstoned
from cosmati.routing.policy_file import load_policy
from tests.train.isolated.samples import (
    CASES,
    OPTIMIZERS,
    TAXONOMY,
    differing,
    fitted,
    others,
    promise,
    sampled,
    source,
    trainer,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("name", "optimizer"), sampled(CASES, list(OPTIMIZERS)))
def test_a_class_leaves_nothing_outside_of_its_own(name: str, optimizer: str) -> None:
    case, data = CASES[name], source(CASES[name])
    present = fitted(case, data, OPTIMIZERS[optimizer]())
    gone = fitted(case, Tombstoned(data, classes=["personal"]), OPTIMIZERS[optimizer]())
    assert promise(present).holds, promise(present)
    assert not differing(others(present), others(gone))
    own = present.assembly.regions.parameters[1]
    learnt = [n for n in own if not torch.equal(present.model.state_dict()[n], gone.model.state_dict()[n])]
    assert len(learnt) == len(own)


def test_it_leaves_nothing_where_a_loop_gives_mixed_rows() -> None:
    """They're regrouped by class, as if those that are gone were there."""
    case, own, num = CASES["MLP, low rank"], TAXONOMY.classes.index("personal"), 14
    made = []
    for is_gone in (False, True):
        run, generator = trainer(case, None), torch.Generator().manual_seed(3)
        with run:
            for step in range(3):
                lineage = Lineage(torch.arange(num) + num * step, torch.arange(num) % 3)
                batch = Batch(case.rows(generator, num), lineage)
                run.step(bury(batch, lineage.class_ids == own) if is_gone else batch)
        made.append(run)
    assert promise(made[0]).holds
    assert not differing(others(made[0]), others(made[1]))


BY_DEPTH = """
version: 1
taxonomy: t
phases: [{name: start, until: 3ba}, {name: rest}]
regions: {own: {tag: isolated/personal}, trunk: {params: "*", exclude: ["blocks.*", "*.isolated.*"]}}
depth: {container: blocks, ranges: [0-0, 1-], open: [{phase: start, blocks: 1-}]}
rules:
  - {class: "**", weight: 1}
  - {class: "**", region: own, weight: 0}
  - {class: personal, weight: 0}
  - {class: personal, region: own, weight: 1}
"""


def test_it_leaves_nothing_beside_a_schedule_of_depth() -> None:
    """What is its own lies in the blocks, and in a region of its own."""
    case, chosen = CASES["GPT, low rank"], load_policy(BY_DEPTH)
    data = source(case)
    present, gone = (fitted(case, one, chosen=chosen) for one in (data, Tombstoned(data, classes=["personal"])))
    regions = dict(zip(present.assembly.regions.names, present.assembly.regions.parameters, strict=True))
    assert {*regions} == {"own", "trunk", "blocks.0-0", "blocks.1-"}
    assert all(("isolated" in name) == (region == "own") for region, names in regions.items() for name in names)
    assert promise(present).holds
    assert not differing(others(present), others(gone))
