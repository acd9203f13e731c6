"""A step's gradients are those of its microbatches' weighted mean, in each region of those that may teach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Clock
from cosmati.core.loss import Loss, LossFunction, Regression
from cosmati.core.method import Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.errors import BatchError, DataError, OutOfMemoryError, PlanError
from cosmati.optim.optimizers import SGD
from cosmati.routing.regions import Regions
from cosmati.train import gradients
from cosmati.train.assembly import Assembly
from cosmati.train.config import RunConfig
from cosmati.train.direction_sketch import WIDTH, DirectionSketch
from cosmati.train.due_details import NOTHING_DUE, DueDetails
from cosmati.train.gradients import StepGradients, StepInput, StepPasses
from cosmati.train.ingredients import Ingredients
from cosmati.train.layout.whole import Whole
from cosmati.train.layout.whole_step import WholeStep
from cosmati.train.leaf_facts import LeafFacts
from cosmati.train.prepare import prepare
from cosmati.train.routes import Route, Router
from cosmati.train.timing import Stopwatch


def squares(model: nn.Module, data: Any) -> Loss:
    """Weighs each row by its third column."""
    per_row = (model(data[0]) - data[1]).square().sum(1) * data[2]
    return Loss(per_row.sum(), data[2].sum())


@dataclass(frozen=True, kw_only=True)
class Offset(Method):
    """Adds a number to every weight for a second pass, and takes note of what it was given."""

    stage: ClassVar[Stage] = Stage.AGAIN
    by: float | None = 0.5

    def perturbation(self, weights: Pieces, gradients: Pieces, at: Position) -> Pieces | None:
        assert not torch.is_grad_enabled()
        ASKED.append((weights.names, gradients.names, at.microbatch))
        return (
            None
            if self.by is None
            else weights.having({n: torch.full_like(w, self.by) for n, w in weights.tensors.items()})
        )


ASKED: list[Any] = []
REGIONS = Regions(("body", "head"), (("0.weight", "0.bias"), ("2.weight", "2.bias")), (("0",), ("2",)))


class World:
    """Two linear layers, microbatches of three rows, and all events of their passes."""

    def __init__(
        self,
        num: int = 4,
        loss: LossFunction = squares,
        model: nn.Module | None = None,
        methods: Sequence[Method] = (),
        bound: Callable[[LossFunction, Position], LossFunction] = lambda loss, _: loss,
        **changed: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        made = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)) if model is None else model
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        config = RunConfig(budget="9ba", num_microbatches=num, num_threads=1, seed=5)
        given = Ingredients(made, loss, None, [SGD(lr=0.1)], methods, None, None, config)
        a = prepare(given).assembly
        if model is None:
            a = replace(a, regions=REGIONS, layout=Whole(made, REGIONS, a.ranks, num))
        self.assembly: Assembly = replace(a, **changed)
        self.told: list[str] = []
        self.watch = Stopwatch()
        self.watch.on_lap = self.told.append
        self.passes = StepPasses(self.assembly, bound, self.watch, self.told.append)
        self.rows = [
            (
                torch.randn(3, 2, generator=generator),
                torch.randn(3, 1, generator=generator),
                torch.rand(3, generator=generator),
            )
            for _ in range(num)
        ]
        self.regions = len(self.assembly.regions.names)

    def step(self, routes: Sequence[Route] | None = None, number: int = 2, **changed: Any) -> StepInput:
        batches = [Batch(rows, Lineage(torch.arange(3), torch.zeros(3, dtype=torch.int64))) for rows in self.rows]
        clock, a = Clock(step=number), self.assembly
        positions = [Position(clock, a.budget, 5, i, a.model, a.turns[0].loss) for i in range(len(batches))]
        given = {"batches": batches, "positions": positions, "routes": routes or self.routes(), "num_tokens": 3}
        return StepInput(**given | changed)

    def routes(self, *changed: tuple[int, Mapping[str, Any]]) -> list[Route]:
        own = [Route(0, 0, 0, (1.0,) * self.regions, offered=True) for _ in self.rows]
        for index, what in changed:
            own[index] = own[index]._replace(**what)
        return own

    def run(self, step: StepInput | None = None, due: DueDetails = NOTHING_DUE) -> StepGradients:
        return self.passes(self.step() if step is None else step, self.assembly.turns[0], due)

    def by_hand(self, index: int, moved: float = 0.0) -> tuple[dict[str, Tensor], float, float]:
        """Gradient of a microbatch's sum, the sum and its weight, in float64."""
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        model.load_state_dict({n: v.double() + moved for n, v in self.assembly.model.state_dict().items()})
        found = squares(model, tuple(one.double() for one in self.rows[index]))
        found.sum.backward()  # type: ignore[no-untyped-call]
        return (
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            float(found.sum.detach()),
            float(found.weight),
        )


def mean_of(found: Sequence[tuple[dict[str, Tensor], float, float]], name: str) -> Tensor:
    total = sum(weight for _, _, weight in found)
    return torch.stack([one[name] for one, _, _ in found]).sum(0) / total


def close(own: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(own.double(), other.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_the_root_is_the_gradient_of_the_weighted_mean(num: int) -> None:
    world = World(num)
    found = world.run()
    own = [world.by_hand(i) for i in range(num)]
    assert set(found.root.names) == {name for name, _ in world.assembly.model.named_parameters()}
    for name, gradient in found.root.tensors.items():
        close(gradient, mean_of(own, name))
    close(found.loss, torch.tensor(sum(s for _, s, _ in own) / sum(w for _, _, w in own)))
    close(found.weights, torch.tensor([w for _, _, w in own]))
    assert found.num_rows.tolist() == [3.0] * num
    assert (found.labels, found.statistics, found.is_finite) == (None, [], False)
    assert found.figures == (None, None, None)


def test_each_part_of_a_pass_is_told_and_timed_in_its_order() -> None:
    world = World(2)
    world.run()
    one = ["forward", "forward", "leaf", "backward"]
    assert world.told == [*one, *one, "tree", "backward"]


def test_norms_and_directions_are_those_of_a_leaf_in_the_mean() -> None:
    world, sketch = World(2), DirectionSketch(5)
    found = world.run(due=DueDetails(norms=True, sketch=sketch))
    own = [world.by_hand(i) for i in range(2)]
    total = sum(w for _, _, w in own)
    norms, sketches = found.figures.norms, found.figures.sketches
    assert norms is not None
    assert sketches is not None
    assert sketches.shape == (2, world.regions, WIDTH)
    assert not sketches.isnan().any()
    for region, names in enumerate(world.assembly.regions.parameters):
        squared = [sum(float(g[n].square().sum()) for n in names) for g, _, _ in own]
        close(norms[:, region], torch.tensor(squared).sqrt() / total)
    assert found.figures.entropies is None


def test_what_may_not_teach_a_region_is_in_no_mean_of_it() -> None:
    world = World(2)
    found = world.run(world.step(world.routes((1, {"weights": (0.0, 1.0)}))))
    own = [world.by_hand(i) for i in range(2)]
    close(found.root.tensors["0.weight"], mean_of(own[:1], "0.weight"))
    close(found.root.tensors["2.weight"], mean_of(own, "2.weight"))


def test_what_is_not_offered_is_not_run() -> None:
    world = World(2)
    found = world.run(world.step(world.routes((0, {"offered": False}))))
    close(found.root.tensors["0.bias"], mean_of([world.by_hand(1)], "0.bias"))
    assert found.weights[0] == 0
    assert found.num_rows.tolist() == [0.0, 3.0]
    assert world.told.count("forward") == 2, "told and timed once"
    assert world.told.count("leaf") == 2


def test_where_nothing_weighs_anything_the_loss_is_zero_and_nothing_learns() -> None:
    world = World(2)
    off = {"offered": False}
    found = world.run(world.step(world.routes((0, off), (1, off))))
    assert float(found.loss) == 0.0
    assert found.root.names == ()


def test_what_is_frozen_has_no_gradient() -> None:
    world = World(2)
    found = world.run(world.step(frozen=frozenset({"0.bias"})))
    assert set(found.root.names) == {"0.weight", "2.weight", "2.bias"}


def test_an_earlier_failure_is_raised_and_nothing_is_run() -> None:
    world = World(2)
    with pytest.raises(OutOfMemoryError, match="no room"):
        world.run(world.step(failure=OutOfMemoryError("no room")))
    assert "forward" not in world.told


def test_tombstones_are_no_rows_and_teach_nothing() -> None:
    world = World(2, loss=Regression())
    step = world.step()
    gone = replace(step.batches[1], lineage=Lineage(torch.tensor([0, -1, 2]), torch.zeros(3, dtype=torch.int64)))
    found = world.run(replace(step, batches=[step.batches[0], gone]))
    assert found.num_rows.tolist() == [3.0, 2.0]
    assert found.weights.tolist() == [3.0, 2.0]


def test_a_model_whose_layers_were_frozen_is_compared_with_the_plan_in_its_first_turn() -> None:
    world = World(2)
    world.assembly.layout.parameters[0].tensor.requires_grad_(requires_grad=False)
    with pytest.raises(PlanError, match=r"0\.weight trained, and doesn't now"):
        world.run()
    other = replace(world.assembly.turns[0], name="another")
    found = world.passes(world.step(frozen=frozenset({"0.weight"})), other, NOTHING_DUE)
    assert "0.bias" in found.root.names


class TestSecondPass:
    """A second pass reads the same rows with moved weights."""

    def test_its_gradients_are_the_ones_at_the_moved_weights(self) -> None:
        ASKED.clear()
        world = World(2, methods=[Offset()])
        before = {name: value.clone() for name, value in world.assembly.model.state_dict().items()}
        found = world.run(due=DueDetails(norms=True))
        own = [world.by_hand(i, 0.5) for i in range(2)]
        for name, gradient in found.root.tensors.items():
            close(gradient, mean_of(own, name))
            assert torch.equal(world.assembly.model.state_dict()[name], before[name])
        first = [world.by_hand(i) for i in range(2)]
        close(found.loss, torch.tensor(sum(s for _, s, _ in first) / sum(w for _, _, w in first)))
        assert found.figures.norms is not None
        total = sum(w for _, _, w in own)
        squared = [sum(float(g.square().sum()) for n, g in one.items() if n[0] == "0") for one, _, _ in own]
        region = world.assembly.regions.region_of["0.weight"]
        close(found.figures.norms[:, region], torch.tensor(squared).sqrt() / total)
        assert world.told.index("again") == len(world.told) // 2
        assert [(found.root.names, found.root.names, 0)] == ASKED

    def test_what_is_known_to_be_finite_is_of_the_pass_whose_gradients_are_applied(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = WholeStep.root

        def known(step: WholeStep, denominators: Tensor | None) -> Pieces:
            root = own(step, denominators)
            step.is_finite = True
            return root

        monkeypatch.setattr(WholeStep, "root", known)
        assert World(2).run().is_finite
        assert World(2, methods=[Offset()]).run().is_finite
        assert not World(2, methods=[Offset(by=None)]).run().is_finite

    def test_a_method_sees_the_weights_that_have_a_gradient(self) -> None:
        ASKED.clear()
        world = World(2, methods=[Offset()])
        world.run(world.step(frozen=frozenset({"2.bias"})))
        assert set(ASKED[0][0]) == {"0.weight", "0.bias", "2.weight"}

    def test_who_wants_none_leaves_the_first_which_may_have_been_written_to(self) -> None:
        world = World(2, methods=[Offset(by=None)])
        found = world.run()
        close(found.root.tensors["0.bias"], mean_of([world.by_hand(i) for i in range(2)], "0.bias"))
        assert not found.is_finite
        assert "again" not in world.told

    def test_entropies_are_those_of_the_weights_as_they_are(self) -> None:
        own = World(2).run(due=DueDetails(entropy=True)).figures.entropies
        found = World(2, methods=[Offset()]).run(due=DueDetails(entropy=True)).figures.entropies
        assert own is not None
        assert found is not None
        assert own.shape == (2, World(2).regions)
        torch.testing.assert_close(found, own, rtol=0, atol=0, equal_nan=True)

    def test_rows_that_the_first_pass_has_changed_are_not_read(self) -> None:
        def writes(model: nn.Module, data: Any) -> Loss:
            result = squares(model, data)
            data[1].add_(1)
            return result

        with pytest.raises(DataError, match=r"The second pass of step 2, for Offset, would read other rows"):
            World(2, loss=writes, methods=[Offset()]).run()
        World(2, loss=writes).run()


def test_statistics_are_read_of_each_microbatch_by_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    world = World(2, model=model)
    with world.assembly.statistics.captured():
        found = world.run()
    assert len(found.statistics) == 2
    for rows, told in zip(world.rows, found.statistics, strict=True):
        close(told[1:4], model[0](rows[0]).mean(0).detach())
        assert told[0] == 1


def test_bare_scalars_are_meant_over_microbatches_of_equally_many_labels() -> None:
    def mean(model: nn.Module, data: Any) -> Tensor:
        return (model(data[0]) - data[1]).square().mean()

    world = World(2, loss=mean)
    found = world.run()
    assert found.weights.tolist() == [1.0, 1.0]
    close(found.loss, torch.stack([mean(world.assembly.model, rows) for rows in world.rows]).mean().detach())
    wanted = torch.stack([mean(world.assembly.model, rows) for rows in world.rows]).mean()
    wanted.backward()  # type: ignore[no-untyped-call]
    for name, parameter in world.assembly.model.named_parameters():
        assert parameter.grad is not None
        close(found.root.tensors[name], parameter.grad)
        parameter.grad = None
    labels = [torch.tensor([1, -100, 2]), torch.tensor([1, 2, 2])]
    world.rows = [(rows[0], rows[1], one) for rows, one in zip(world.rows, labels, strict=True)]
    with pytest.raises(BatchError, match=r"its microbatches have \[2, all\] labels"):
        world.run()


def test_each_microbatch_draws_by_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def bound(loss: LossFunction, at: Position) -> LossFunction:
        seen.append((loss, at.microbatch, float(torch.rand(()))))
        return loss

    world = World(2, bound=bound)
    world.run()
    first = list(seen)
    assert [one[:2] for one in first] == [(squares, 0), (squares, 1)]
    assert first[0][2] != first[1][2]
    seen.clear()
    world.run()
    assert seen == first
    seen.clear()
    world.run(world.step(number=3))
    assert not {one[2] for one in seen} & {one[2] for one in first}


def test_ranks_are_compared_before_the_first_step_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    world, compared = World(2), list[object]()
    monkeypatch.setattr(gradients, "refuse_unlike_parts", lambda a, roots, objective, batch: compared.append(batch))
    for number in (3, 3):
        step = world.step(number=number)
        world.passes._compare(step, world.assembly.turns[0])
        assert compared[:1] == compared
    assert len(compared) == 1


def test_labels_of_packs_are_told_by_class_and_what_a_class_has_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    router = Router(None, REGIONS, (0, 1))
    monkeypatch.setattr(router, "running", lambda route, batch, device: told.append((route, batch)) or nullcontext())
    world = World(2, router=router)
    tokens: Any = SimpleNamespace(teachers=lambda own: own, mixed=frozenset())
    step = world.step(world.routes((1, {"tokens": tokens})))

    def microbatch(slot: object, batch: Batch, position: Position, *given: object) -> LeafFacts:
        own = torch.tensor([3.0, 1.0], dtype=torch.float64) if position.microbatch else None
        return LeafFacts(6.0, 2.0, 3.0, 0.0, 0.0, labels=own)

    monkeypatch.setattr(world.passes, "_microbatch", microbatch)
    found = world.run(step)
    assert told == list(zip(step.routes, step.batches, strict=True))
    assert found.labels is not None
    assert found.labels.tolist() == [[0.0, 0.0], [3.0, 1.0]]
    assert (float(found.loss), found.weights.tolist(), found.num_rows.tolist()) == (3.0, [2.0, 2.0], [3.0, 3.0])
