"""The instrument: one row or one region is perturbed, and it's seen where the change arrives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, LanguageModel, Loss
from cosmati.core.method import Coupling, Method, Position
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.methods.cases import NUM_STEPS, Case, digits, network, text

ROWS = 8
ROWS_A_STEP = 3
BODY, HEAD = "body", "head"


def position(case: Case, model: nn.Module, step: int) -> Position:
    loss = LanguageModel() if case.is_text else Classification(10)
    return Position(Clock(step, 0, step), Budget(Time.parse(f"{NUM_STEPS}ba")), 0, 0, model, loss)


def free_network(case: Case) -> nn.Module:
    """Return a model that couples no rows itself, as the method's surgery leaves it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.on.apply(network(is_text=case.is_text, group_norm=not case.is_text))


class Sight(NamedTuple):
    """What another content of one row did to the other rows.

    Attributes:
        row: which one was changed.
        reached: other rows whose loss, or its weight, changed.
        heirs: other rows that lineage says it's in.
        takes_part: whether other rows take part now.
        moves_gradients: whether what the other rows teach changed.
    """

    row: int
    reached: frozenset[int]
    heirs: frozenset[int]
    takes_part: bool
    moves_gradients: bool

    @property
    def is_coupled(self) -> bool:
        return bool(self.reached) or self.takes_part or self.moves_gradients


class Rows(NamedTuple):
    """A microbatch after the method, with each row's part of the loss."""

    lineage: Lineage
    losses: Tensor
    weights: Tensor
    parameters: list[nn.Parameter]

    def taught_by_all_but(self, row: int) -> list[Tensor]:
        others = self.losses[self.lineage.row_ids != row].sum()
        found = torch.autograd.grad(others, self.parameters, retain_graph=True, allow_unused=True)
        return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def rows_of(case: Case, model: nn.Module, data: Any, step: int) -> Rows:
    """Take a microbatch through the method's hook, the model in training and the loss."""
    model = copy.deepcopy(model)
    at = position(case, model, step)
    torch.manual_seed(step)
    batch = case.on.batch(Batch(data, Lineage.of_rows(0, ROWS)), at)
    torch.manual_seed(step)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bfloat16"):
        result = at.loss(model, batch.data)
    assert isinstance(result, Loss)
    assert result.per_row is not None
    weights = torch.ones_like(result.per_row) if result.per_row_weight is None else result.per_row_weight
    return Rows(batch.lineage, result.per_row, weights, list(model.parameters()))


def perturbed(data: tuple[Tensor, Tensor], row: int, *, is_text: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the data with another input in a row, and with another target."""
    inputs, targets = data[0].clone(), data[1].clone()
    inputs[row] = (inputs[row] * 7 + 1) % 256 if is_text else 1 - inputs[row].flip(-1)
    targets[row] = (targets[row] + 1) % (256 if is_text else 10)
    return [(inputs, data[1]), (data[0], targets)]


def see_rows(case: Case, model: nn.Module) -> Iterator[Sight]:
    """Change the input and the target of some rows at every step, each row at one step at least."""
    data = tuple(part[:ROWS] for part in (text() if case.is_text else digits()))
    for step in range(NUM_STEPS):
        before = rows_of(case, model, data, step)
        for row in {(step * ROWS_A_STEP + index) % ROWS for index in range(ROWS_A_STEP)}:
            for other in perturbed((data[0], data[1]), row, is_text=case.is_text):
                yield _compare(before, rows_of(case, model, other, step), row)


def _compare(before: Rows, after: Rows, row: int) -> Sight:
    ids = after.lineage.row_ids
    if not torch.equal(before.lineage.row_ids, ids):
        others = ids[ids != row].tolist() != before.lineage.row_ids[before.lineage.row_ids != row].tolist()
        return Sight(row, frozenset(), frozenset(), others, moves_gradients=False)
    changed = (before.losses != after.losses) | (before.weights != after.weights)
    parents = ids[:, None] if after.lineage.parents is None else after.lineage.parents
    found = [set(ids[mask].tolist()) - {row} for mask in (changed, (parents == row).any(1))]
    one, two = before.taught_by_all_but(row), after.taught_by_all_but(row)
    moves = not all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    return Sight(row, frozenset(found[0]), frozenset(found[1]), takes_part=False, moves_gradients=moves)


def row_faults(case: Case) -> set[str]:
    """Return what is wrong with what a method says of rows."""
    sights = list(see_rows(case, free_network(case)))
    faults = _difference("rows", case.on, is_seen=any(sight.is_coupled for sight in sights))
    # What a row is made of is in its lineage.
    return faults | {"not in the lineage" for sight in sights if not sight.reached <= sight.heirs}


def region_faults(case: Case) -> set[str]:
    """Return what is wrong with what a method says of regions, by its hooks alone."""
    return _difference("regions", case.on, is_seen=regions_are_coupled(case.on, free_network(case), case))


def _difference(coupling: Coupling, method: Method, *, is_seen: bool) -> set[str]:
    is_declared = coupling in method.couples
    if is_seen == is_declared:
        return set()
    return {f"{coupling}: declared, never seen" if is_declared else f"{coupling}: seen, not declared"}


def regions_are_coupled(method: Method, model: nn.Module, case: Case) -> bool:
    """Say whether other gradients in one region, or none, change what becomes of the other region's."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    names = list(parameters)
    regions = {name: int(index >= len(names) // 2) for index, name in enumerate(names)}
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}

    def outcomes(given: Mapping[str, Tensor], far: int) -> list[dict[str, Tensor]]:
        found = [method.gradients(given, parameters, regions)]
        for step in range(NUM_STEPS):
            at = position(case, model, step)
            found.append(method.perturbation({name: parameters[name] for name in given}, given, at) or {})
        return [{name: value for name, value in each.items() if regions[name] == far} for each in found]

    def differ(near: int) -> bool:
        own = [name for name in names if regions[name] == near]
        before = outcomes(gradients, 1 - near)
        for some in (own[:1], own[-1:], own):
            louder = {name: 3 * g + 1 if name in some else g for name, g in gradients.items()}
            absent = {name: g for name, g in gradients.items() if name not in some}
            for given in (louder, absent):
                for one, two in zip(before, outcomes(given, 1 - near), strict=True):
                    if one.keys() != two.keys() or any(not torch.equal(one[name], two[name]) for name in one):
                        return True
        return False

    return differ(0) or differ(1)


POLICY = """
version: 1
taxonomy: t
regions:
  body: {params: ["*"], exclude: ["head*"]}
  head: {params: ["head*"]}
rules:
  - {class: open, weight: 1}
"""


def governed_step(case: Case, denied: str, *, is_swapped: bool, step: int = 3) -> tuple[Trainer, dict[str, Tensor]]:
    """Take one step of a real run in which the rows of one class may not teach a region.

    Returns:
        The run, and how far each parameter moved.
    """
    weights = {BODY: int(denied != BODY), HEAD: int(denied != HEAD)}
    rules = "".join(f"  - {{class: doubtful, region: {r}, weight: {w}}}\n" for r, w in weights.items())
    run = Trainer(
        network(is_text=case.is_text, group_norm=case.group_norm),
        LanguageModel() if case.is_text else Classification(10),
        optimizers=[SGD(lr=0.1)],
        methods=[case.on],
        policy=load_policy(POLICY + rules),
        taxonomy=Taxonomy("t", "1", (("open", "all may learn from it"), ("doubtful", "not all may"))),
        config=RunConfig(budget=f"{NUM_STEPS}ba", num_microbatches=2, num_threads=1, precision=case.precision),
    )
    data = tuple(part[: 2 * ROWS] for part in (text() if case.is_text else digits()))
    if is_swapped:
        for row in range(ROWS, 2 * ROWS):
            inputs, targets = (perturbed((data[0], data[1]), row, is_text=case.is_text)[i][i] for i in (0, 1))
            data = (inputs, targets)
    batches = [
        Batch(tuple(part[i * ROWS :][:ROWS] for part in data), Lineage(torch.arange(ROWS) + i * ROWS, ids), i)
        for i, ids in enumerate(torch.arange(2)[:, None].expand(2, ROWS))
    ]
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with run:
        run.clock = Clock(step, 0, step)
        run.step_microbatches(batches, [0, 1])
    return run, {name: p.detach() - before[name] for name, p in run.model.named_parameters()}


def governed_faults(case: Case, denied: str) -> set[str]:
    """Return what is wrong with what the plan promises of a region, where a class that it denies has other rows."""
    run, one = governed_step(case, denied, is_swapped=False)
    _, two = governed_step(case, denied, is_swapped=True)
    region_of = {name: HEAD if name.startswith("head") else BODY for name in one}
    reached = {region_of[name] for name in one if not torch.equal(one[name], two[name])}
    assert reached >= {BODY, HEAD} - {denied} or not case.learns, "the other region learns from it"
    is_promised = run.plan.holds(f"no_direct_write(doubtful, {denied})")
    if is_promised == (denied not in reached):
        return set()
    return {"the promise is broken" if is_promised else "the promise is withheld for nothing"}


def row_coupled_layers(model: nn.Module) -> list[str]:
    """Return the names of layers of which a row's output follows another row's input."""
    leaves = {name: layer for name, layer in model.named_modules() if not list(layer.children())}
    seen: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].detach()}))
        for name, layer in leaves.items()
    ]
    model = model.train()
    model(digits()[0][:ROWS])
    for handle in handles:
        handle.remove()

    def follows(layer: nn.Module, given: Tensor) -> bool:
        other = given.clone()
        other[0] = 2 * other[0] + 1
        return not torch.equal(layer(given)[1:], layer(other)[1:])

    with torch.no_grad():
        return [name for name, given in seen.items() if follows(leaves[name], given)]
