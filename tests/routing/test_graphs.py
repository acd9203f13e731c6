"""Which parameters an objective's graph leads to, and which inputs' gradients are summed in another order."""

from __future__ import annotations

import torch
from torch import nn

from cosmati.routing.autograd_graph import parameters_reached
from cosmati.train.layout.regrouped import regrouped


def test_the_parameters_that_an_objective_follows_from_are_reached() -> None:
    used, twice, unused, direct = (nn.Parameter(torch.ones(2)) for _ in range(4))
    objective = (used * 2 + twice * twice.detach() + twice).sum() + direct.sum()
    assert parameters_reached(objective) == {id(used), id(twice), id(direct)}
    assert id(unused) not in parameters_reached(objective)
    assert parameters_reached(torch.ones(())) == set()
    with torch.no_grad():
        assert parameters_reached((used * 2).sum()) == set()


def test_an_input_that_a_block_reads_several_times_beside_others_is_found() -> None:
    """A node stands between a block and its input, as FSDP2's does."""
    leaf = torch.ones(2, requires_grad=True)
    for inside, outside, is_found in ((2, 1, True), (2, 0, False), (1, 1, False), (1, 2, False), (3, 2, True)):
        given = leaf * 2
        block = given.view_as(given)
        objective = sum((block * n).sum() for n in range(1, inside + 1))
        for n in range(outside):
            objective = objective + (given + n).sum()
        assert isinstance(objective, torch.Tensor)
        assert regrouped(objective, [(7, block), (8, leaf)]) == ({7} if is_found else set())
