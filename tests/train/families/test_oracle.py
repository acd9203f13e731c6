"""What each family learns against each row alone, in float64: every optimizer, equal and ragged microbatches."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cosmati.train.step_rows import split_batch
from tests.train.families.samples import (
    FAMILIES,
    OPTIMIZERS,
    SIZES,
    by_hand,
    in_double,
    microbatches,
    mixed,
    oracle,
    policy,
    run,
    trainer,
)

pytestmark = pytest.mark.long

LOADED = [(family, name, "mixed") for family in FAMILIES for name in ("SGD", "AdamW", "Muon")]
"""Rows of all classes out of a loader."""
ALL = list(itertools.product(FAMILIES, OPTIMIZERS, SIZES)) + LOADED
SAMPLE = [(family, "SGD", "ragged") for family in FAMILIES]
SAMPLE += [(random.Random(name).choice(list(FAMILIES)), name, "pure") for name in OPTIMIZERS]
SAMPLE += [LOADED[0], LOADED[-8], LOADED[-2]]


def hold(name: str, optimizer: str, strategy: str) -> None:
    """Two steps on gradients taken row by row, and applied by hand, are the run's."""
    family = FAMILIES[name]
    network, other = family.model().double(), family.model().double()
    loaded = [in_double([batch])[0] for batch in mixed(family)]
    steps = (
        [split_batch(batch, 4, by_class=True) for batch in loaded]
        if strategy == "mixed"
        else [in_double(microbatches(family, strategy, step)) for step in range(2)]
    )
    data = {"data": DataLoader(loaded, None), "budget": "2ba"} if strategy == "mixed" else {}
    made = trainer(family, network, OPTIMIZERS[optimizer](), policy(family), **data)
    gradients: list[dict[str, Tensor]] = [{}, {}]
    states: list[dict[str, Tensor]] = []

    def look(*_: object) -> None:
        gradients[made.clock.step] |= {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        if len(states) <= made.clock.step:
            states.append({name: value.clone() for name, value in network.state_dict().items()})

    for scheduled in made.assembly.optimizers:
        scheduled.optimizer.register_step_pre_hook(look)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.fit() if data else run(made, steps)
    optimizers = by_hand(OPTIMIZERS[optimizer](), other)
    for step, batches in enumerate(steps):
        if optimizer in _UNSTABLE:
            other.load_state_dict(states[step])
        found = oracle(family, other, batches, step)
        for parameter_name, parameter in other.named_parameters():
            parameter.grad = found.get(parameter_name)
            given = gradients[step].get(parameter_name)
            assert (parameter.grad is None) == (given is None)
            if given is not None and (optimizer in _UNSTABLE or not step):
                torch.testing.assert_close(given, parameter.grad, rtol=1e-9, atol=1e-12)
        for one in optimizers:
            one.step()
    for parameter_name, parameter in other.named_parameters():
        if optimizer not in _UNSTABLE:
            torch.testing.assert_close(network.get_parameter(parameter_name), parameter, rtol=1e-7, atol=1e-9)


_UNSTABLE = ("SOAP", "Lion")
"""Bases of what no row has reached, and signs of what is 0, follow from rounding: what they're given is compared."""


@pytest.mark.parametrize("combination", SAMPLE, ids=", ".join)
def test_each_row_alone_by_its_route(combination: tuple[str, str, str]) -> None:
    hold(*combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", [one for one in ALL if one not in SAMPLE], ids=", ".join)
def test_each_row_alone_by_its_route_in_any_combination(combination: tuple[str, str, str]) -> None:
    hold(*combination)


def test_the_sample_has_some_of_everything() -> None:
    assert [set(part) for part in zip(*SAMPLE, strict=True)] == [set(FAMILIES), set(OPTIMIZERS), {*SIZES, "mixed"}]
