"""One contract for every layout: whole, with optimizers shared out, sharded by FSDP2; against brute force."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.state import model_tensors, optimizer_tensors, parameter_root
from tests.processes import launch_ranks
from tests.train.layouts.worker import DENOMINATORS, NEAR_OUTPUT_ALONE, ROUTES, digest, make, objective

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
KINDS = {
    "whole": ("whole", 1),
    "whole on two ranks": ("whole", 2),
    "optimizers shared out on two ranks": ("shared out", 2),
    "optimizers shared out on four ranks": ("shared out", 4),
    "sharded on two ranks": ("sharded", 2),
    "sharded on four ranks": ("sharded", 4),
    "copies of shards on four ranks": ("copies", 4),
}
MINE = ([0, 1, 2, 3], [0, 1], [0, 1], [0], [0, 2], [0], [0])
EVERY_KIND = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if world == 4 else []) for kind, (_, world) in KINDS.items()]
)


@cache
def exercised(kind: str) -> dict[str, Any]:
    layout, world = KINDS[kind]
    return json.loads(launch_ranks(["-m", "tests.train.layouts.worker", layout], world)[0])  # type: ignore[no-any-return]


def leaves(routes: Any, frozen: frozenset[int] = frozenset()) -> list[dict[str, Tensor]]:
    """Each microbatch's gradients by themselves, attenuated; what is denied isn't there."""
    model, regions, data = make()
    named = dict(model.named_parameters())
    found = []
    for rows, weights in zip(data, routes, strict=True):
        gradients = torch.autograd.grad(objective(model, rows), list(named.values()))
        leaf = {}
        for index, (name, gradient) in enumerate(zip(named, gradients, strict=True)):
            rho = weights[regions.region_of[name]]
            if rho and index not in frozen:
                leaf[name] = gradient * rho
        found.append(leaf)
    return found


def added(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
    both = {name: left[name] + right[name] for name in left if name in right}
    return {**left, **right, **both}


def mean(routes: Any, frozen: frozenset[int] = frozenset()) -> dict[str, Tensor]:
    """((0, 1), (2, 3)), over the region's denominator."""
    first, second, third, fourth = leaves(routes, frozen)
    total = added(added(first, second), added(third, fourth))
    regions = make()[1].region_of
    return {name: gradient / DENOMINATORS[regions[name]].float() for name, gradient in total.items()}


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


@EVERY_KIND
def test_roots_are_those_of_brute_force(kind: str) -> None:
    found = exercised(kind)
    assert found["root"] == digests(mean(ROUTES))
    assert found["unmeasured"] == found["root"]
    assert found["near output alone"] == digests(mean(NEAR_OUTPUT_ALONE))
    assert all(name.startswith(("blocks.1", "head")) for name in found["near output alone"])
    names = [name for _, name, _ in found["parameters"]]
    assert found["frozen"] == digests(mean(ROUTES, frozenset({0, 5})))
    assert set(names) - set(found["frozen"]) == {names[0], names[5]}


@EVERY_KIND
def test_norms_are_of_leaves_and_of_whole_tensors(kind: str) -> None:
    found = exercised(kind)
    regions = make()[1].region_of

    def norm(tensors: list[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors]))

    rows = []
    for leaf in leaves(ROUTES):
        own = [[g for name, g in leaf.items() if regions[name] == region] for region in (0, 1)]
        rows.append([norm(tensors).double() if tensors else torch.tensor(torch.nan).double() for tensors in own])
    assert found["leaf norms"] == digest(torch.stack([torch.stack(row) for row in rows]))
    root = mean(ROUTES)
    assert found["norm"] == digest(norm(list(root.values())))
    for region in (0, 1):
        own = [g for name, g in root.items() if regions[name] == region]
        assert found["norm by region"][str(region)] == digest(norm(own))
    by_row = {name: g / (1 + torch.linalg.vector_norm(g, dim=-1, keepdim=True)) for name, g in root.items()}
    assert found["rows normalized"] == digests(by_row)
    factors = (torch.tensor(0.5), torch.tensor(3.0))
    assert found["said by the last"] == [True, False]
    assert found["scaled"] == digests({name: g * factors[regions[name]] for name, g in root.items()})


@EVERY_KIND
def test_weights_come_back(kind: str) -> None:
    found = exercised(kind)
    model, _, _ = make()
    start = parameter_root(model_tensors(model)).hex()
    assert found["start"] == found["after perturbed"] == found["after replaced"] == start
    root = mean(ROUTES)
    with torch.no_grad():
        for name in list(root)[:4]:
            model.get_parameter(name).add_(root[name])
    assert found["perturbed"] == parameter_root(model_tensors(model)).hex()
    assert found["root there"] != found["root"]
    model, _, _ = make()
    doubled = {name: 2 * value for name, value in model_tensors(model).items()}
    assert found["replaced"] == parameter_root(doubled).hex()


@EVERY_KIND
def test_what_is_absent_does_not_move(kind: str) -> None:
    found = exercised(kind)
    assert found["moved"] == sorted(found["near output alone"]) == found["held after commit"]
    model, _, _ = make()
    before = dict(model.named_parameters())
    for name, gradient in mean(NEAR_OUTPUT_ALONE).items():
        before[name].grad = gradient
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert found["after commit"] == digests(dict(before))
    assert found["digest"] == found["digest of saved"] == parameter_root(model_tensors(model)).hex()
    assert found["loaded"] is True
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert found["state of the optimizer"] == digests(optimizer_tensors(optimizer, names)[0])
    assert found["state of the method"] == digests({f"average/{name}": p for name, p in before.items()})
    assert found["optimizer again"] is found["method again"] is True


@EVERY_KIND
def test_every_layout_gives_the_same(kind: str) -> None:
    first, other = exercised("whole"), exercised(kind)
    same = {name for name in first if first[name] == other.get(name)}
    assert set(first) - same <= {"mine", "digest of the model"}
    assert other["mine"] == MINE[list(KINDS).index(kind)]
    assert first["parameters"] == [[i, name, region] for i, (name, region) in enumerate(_named_regions())]


def _named_regions() -> list[tuple[str, int]]:
    model, regions, _ = make()
    return [(name, regions.region_of[name]) for name, _ in model.named_parameters()]
