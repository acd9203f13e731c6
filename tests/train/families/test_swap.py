"""What a denied class's rows hold moves no region that denies it, in bits: every family, optimizer and strategy."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.plan import Promise
from cosmati.optim import SGD, AdamW
from cosmati.train.trainer import Trainer
from tests.train.families.samples import (
    BIASED,
    FAMILIES,
    OPTIMIZERS,
    PACKED,
    WEIGHTS,
    Family,
    language,
    microbatches,
    mixed,
    policy,
    run,
    trainer,
)
from tests.train.packs import samples as packs

pytestmark = pytest.mark.long

DENIED = {"doubtful": "lower", "personal": "upper"}
"""The region that denies each of the classes; with `WEIGHTS`."""
ALL = [(f, o, s) for f, o in itertools.product(FAMILIES, OPTIMIZERS) for s in ("pure", "ragged")]
ALL += [(f, o, "mixed") for f, o in itertools.product(FAMILIES, ("SGD", "AdamW", "Muon"))]
ALL += [(f, o, "packed") for f, o in itertools.product(PACKED, OPTIMIZERS)]
SAMPLE = [(name, "AdamW", "ragged") for name in FAMILIES] + [(name, "SGD", "packed") for name in PACKED]
SAMPLE += [("transformer", "AdamW", "mixed"), ("ResNet", "Muon", "mixed"), ("gathered experts", "SGD", "mixed")]
SAMPLE += [(random.Random(name).choice(list(FAMILIES)), name, "pure") for name in OPTIMIZERS]


def trained(family: Family, optimizers: Any, strategy: str, swapped: str = "", weights: Any = WEIGHTS) -> Trainer:
    """Train for two steps, or one of packs; in the last one a class's content may be other content."""
    network, chosen = family.model(), None if weights is None else policy(family, weights)
    if strategy == "packed":
        classes = [packs.CLASSES.index(swapped)] if swapped else []
        given = packs.source(packs.documents(swapped=classes))
        made = packs.trainer(network, given, chosen, optimizers=optimizers)
        made.fit()
        return made
    if strategy == "mixed":
        made = trainer(family, network, optimizers, chosen, data=mixed(family, swapped), budget="2ba")
        made.fit()
        return made
    steps = [microbatches(family, strategy, step, swapped if step else "") for step in range(2)]
    return run(trainer(family, network, optimizers, chosen), steps)


def state_of(made: Trainer) -> dict[str, dict[str, Tensor]]:
    """Return parameters and buffers of each region, as they are after training."""
    regions = made.assembly.regions
    found: dict[str, dict[str, Tensor]] = {name: {} for name in regions.names}
    for name, value in made.model.state_dict().items():
        region = regions.region_of.get(name, regions.region_of_buffer(name))
        for own in found if region is None else [regions.names[region]]:
            found[own][name] = value
    return found


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one)


def swap(family: Family, optimizer: str, strategy: str) -> bool:
    """Say whether all that is denied is promised; nothing that's promised may move."""
    optimizers = OPTIMIZERS[optimizer]
    plain = trained(family, optimizers(), strategy)
    states = state_of(plain)
    is_promised = True
    for class_name, region in DENIED.items():
        other = trained(family, optimizers(), strategy, class_name)
        moved = {name for name, state in state_of(other).items() if differs(state, states[name])}
        promised = [made.plan.holds(Promise.NO_DIRECT_WRITE, (class_name, region)) for made in (plain, other)]
        assert not (any(promised) and region in moved)
        # The content did change. Steps along signs may be the same all the same, and SOAP's first one is none.
        assert "head" in moved or optimizer in ("Lion", "Sophia", "SOAP")
        is_promised &= all(promised)
    return is_promised


def _swap(combination: tuple[str, str, str]) -> None:
    family, optimizer, strategy = combination
    assert swap(FAMILIES[family], optimizer, strategy)


@pytest.mark.parametrize("combination", SAMPLE, ids=", ".join)
def test_the_content_of_a_denied_class_moves_nothing(combination: tuple[str, str, str]) -> None:
    _swap(combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", [one for one in ALL if one not in SAMPLE], ids=", ".join)
def test_the_content_of_a_denied_class_moves_nothing_however_combined(combination: tuple[str, str, str]) -> None:
    _swap(combination)


def test_the_sample_has_some_of_everything() -> None:
    strategies = {"pure", "ragged", "mixed", "packed"}
    assert [set(part) for part in zip(*SAMPLE, strict=True)] == [set(FAMILIES), set(OPTIMIZERS), strategies]


@pytest.mark.parametrize("strategy", ["pure", "ragged", "packed"])
@pytest.mark.filterwarnings("ignore:Parameters are read in ways")
def test_a_bias_that_forward_moves_is_named_and_nothing_is_promised(strategy: str) -> None:
    assert not swap(BIASED, "SGD", strategy)
    made = trained(BIASED, OPTIMIZERS["SGD"](), strategy)
    broken = [g.because for g in made.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    because = "couples rows" if strategy == "packed" else "forward changes the buffers blocks."
    assert len(broken) == 2
    assert all(because in one for one in broken)


@pytest.mark.filterwarnings("ignore:Parameters are read in ways")
@pytest.mark.parametrize("name", [name for name in FAMILIES if "experts" in name and name not in PACKED])
def test_experts_that_reach_across_documents_are_promised_nothing_in_packs(name: str) -> None:
    made = trained(FAMILIES[name], [SGD(lr=0.1)], "packed")
    broken = [g for g in made.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    assert len(broken) == 2
    assert all("blocks.0.mixture couples rows" in one.because and not one.holds for one in broken)


ONES = {name: dict.fromkeys(row, 1.0) for name, row in WEIGHTS.items()}


ALIKE = [(name, "pure") for name in FAMILIES]
ALIKE += [(name, "packed") for name, family in FAMILIES.items() if family.loss is language]


@pytest.mark.parametrize(("name", "strategy"), ALIKE)
def test_all_ones_is_the_ungoverned_run_bit_for_bit(name: str, strategy: str) -> None:
    family = FAMILIES[name]
    states = [trained(family, [AdamW(lr=0.01)], strategy, weights=w).model.state_dict() for w in (ONES, None)]
    assert all(map(torch.equal, states[0].values(), states[1].values()))


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_a_family_learns_the_same_up_to_rounding(name: str) -> None:
    family, found = FAMILIES[name], []
    for precision in ("float32", "bfloat16", "bfloat16"):
        network = family.model()
        before = {parameter_name: p.detach().clone() for parameter_name, p in network.named_parameters()}
        steps = [microbatches(family, "pure", 0)]
        run(trainer(family, network, [SGD(lr=1.0)], policy(family), precision=precision), steps)
        found.append({key: before[key] - p.detach() for key, p in network.named_parameters()})
    exact, narrow, again = (torch.cat([value.flatten() for value in one.values()]) for one in found)
    assert torch.equal(narrow, again)
    assert 0 < (narrow - exact).norm() < 0.1 * exact.norm()
