"""All sub-steps of a step are committed in their order, each after a look at it; where one fails, nothing is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Clock
from cosmati.core.pieces import Pieces
from cosmati.errors import DivergenceError
from cosmati.train import commit
from cosmati.train.assembly import Turn
from cosmati.train.buffers import LayerStatistic
from cosmati.train.commit import Commit
from cosmati.train.due_details import NOTHING_DUE, DueDetails
from cosmati.train.gradients import StepGradients, StepInput
from cosmati.train.leaf_facts import LeafFigures

NAMES = ("a", "b", "c")


@dataclass
class World:
    """Three parameters of two regions, an optimizer for each turn, and gradients by turn."""

    every: Mapping[str, int]
    gradients: Mapping[str, Mapping[str, float]]
    change: Callable[[Pieces], Pieces] = lambda root: root
    changes: bool = False
    is_finite: bool = True
    fails_at: str = ""
    layers: Sequence[str] = ()
    kinds: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.told: list[Any] = []
        self.checked: list[dict[str, Any]] = []
        self.held = {n: nn.Parameter(torch.zeros(2, dtype=self.kinds.get(n, torch.float32))) for n in NAMES}
        self.parameters = [
            SimpleNamespace(name=name, region=region, tensor=self.held[name])
            for name, region in zip(NAMES, (1, 0, 1), strict=True)
        ]
        self.optimizers = {
            name: torch.optim.SGD([self.held[n] for n in NAMES], lr=1.0, momentum=0.5) for name in self.every
        }
        self.turns = [
            Turn(name, SimpleNamespace(), {0: "a", 1: "b"} if name == "first" else {2: "c", 1: "b"}, (), every)  # type: ignore[arg-type]
            for name, every in self.every.items()
        ]
        layout = SimpleNamespace(
            parameters=self.parameters,
            weights=lambda: Pieces({name: one.detach() for name, one in self.held.items()}),
            commit=self.commit,
        )
        statistics = SimpleNamespace(layers=self.layers, taught=self.taught)
        self.assembly: Any = SimpleNamespace(
            turns=self.turns,
            layout=layout,
            statistics=statistics,
            ranks="ranks",
            budget="budget",
            optimizers=[SimpleNamespace(optimizer=one) for one in self.optimizers.values()],
            router=SimpleNamespace(teaches=lambda route, layer: (route, layer) == ("route 1", "norm")),
        )
        methods: Any = SimpleNamespace(gradients=self.by_methods, change_gradients=self.changes, loss="loss")
        self.commits = object.__new__(Commit)
        own: dict[str, Any] = {
            "_a": self.assembly,
            "_methods": methods,
            "_passes": self.passes,
            "_stopwatch": SimpleNamespace(lap=lambda part: self.told.append(("lap", part))),
            "_tell": lambda what: self.told.append(("tell", what)),
            "_halves": [p.name for p in self.parameters if p.tensor.dtype == torch.float16],
        }
        for name, value in own.items():
            setattr(self.commits, name, value)

    def by_methods(self, root: Pieces, position: object) -> Pieces:
        self.told.append(("methods", position))
        return self.change(root)

    def passes(self, step: StepInput, turn: Turn, due: DueDetails) -> StepGradients:
        self.told.append(("pass", turn.name, due))
        self.seen = step
        number = [one.name for one in self.turns].index(turn.name) + 1
        if self.fails_at == turn.name:
            raise DivergenceError("the loss is nan")
        return StepGradients(
            root=Pieces({n: torch.full((2,), value) for n, value in self.gradients[turn.name].items()}),
            loss=torch.tensor(float(number)),
            weights=torch.full((2,), number, dtype=torch.float64),
            figures=LeafFigures(norms=torch.full((2, 2), 3.0 if number == 1 else 4.0, dtype=torch.float64)),
            num_rows=torch.ones(2),
            labels=None,
            statistics=[torch.full((2,), float(number))],
            is_finite=self.is_finite,
        )

    def taught(self, seen: list[Tensor], ranks: object, teaches: Callable[[int, str], bool]) -> list[LayerStatistic]:
        self.told.append(("statistics", float(seen[0][0]), ranks))
        assert [teaches(number, "norm") for number in (0, 1)] == [False, True]
        assert not teaches(1, "other")
        return [LayerStatistic("norm", torch.ones(2), torch.full((2,), 2.0), True)]

    def commit(self, root: Pieces, learns: Collection[int], step: Callable[[], None]) -> frozenset[str]:
        self.told.append(("commit", root.names, frozenset(learns), step.args))  # type: ignore[attr-defined]
        name = next(turn.name for turn in self.turns if turn.step == step.func)  # type: ignore[attr-defined]
        optimizer = self.optimizers[name]
        optimizer.param_groups[0]["count"] = optimizer.param_groups[0].get("count", 0) + 1
        for own, tensor in root.tensors.items():
            self.held[own].grad = tensor.to(self.held[own].dtype)
        optimizer.step()
        for one in self.held.values():
            one.grad = None
        return frozenset(root.names)

    def check(self, loss: Tensor, step: int, root: Pieces, folded: Sequence[Tensor], *, is_known: bool) -> None:
        self.told.append(("check", float(loss), step))
        self.checked.append({"root": root, "folded": [one.tolist() for one in folded], "known": is_known})

    def run(self, step: int = 4, due: DueDetails = NOTHING_DUE, frozen: Sequence[str] = ()) -> commit.Committed:
        given = StepInput([torch.ones(2)], ["p0", "p1"], ["route 0", "route 1"], 0, frozenset(frozen))  # type: ignore[list-item]
        self.given = given
        finite: Any = SimpleNamespace(check=self.check)
        return self.commits(given, Clock(step=step), finite, due)

    def weights(self) -> dict[str, list[float]]:
        return {name: one.tolist() for name, one in self.held.items()}


BOTH = {"first": {"a": 1.0, "b": 2.0}, "second": {"c": 3.0}}


def test_a_step_with_one_turn_is_committed_and_told() -> None:
    world = World({"first": 1}, BOTH)
    found = world.run()
    assert world.told == [
        ("pass", "first", NOTHING_DUE),
        ("lap", "method"),
        ("methods", "p0"),
        ("check", 1.0, 4),
        ("tell", "commit"),
        ("commit", ("a", "b"), frozenset({0, 1}), (Clock(step=4), "budget")),
        ("lap", "optimizer"),
    ]
    assert world.weights() == {"a": [-1.0, -1.0], "b": [-2.0, -2.0], "c": [0.0, 0.0]}
    assert world.seen is world.given, "nobody reads it after, so that nothing is copied"
    assert float(found.first.loss) == 1.0
    assert [float(loss) for loss in found.losses] == [1.0]
    assert [(one.regions, one.weights.tolist()) for one in found.taught] == [((0, 1), [1.0, 1.0])]
    assert (found.learnt, found.update, found.statistics) == (frozenset({"a", "b"}), None, [])
    assert world.checked[0]["folded"] == []


def test_two_turns_go_in_their_order_and_each_reads_what_was_given() -> None:
    world = World({"first": 1, "second": 1}, BOTH, layers=["norm"])
    due = DueDetails(entropy=True, norms=True)
    found = world.run(due=due)
    told = [one for one in world.told if one[0] in ("pass", "statistics", "check")]
    assert told == [
        ("pass", "first", due),
        ("statistics", 1.0, "ranks"),
        ("check", 1.0, 4),
        ("pass", "second", DueDetails(norms=True)),
        ("check", 2.0, 4),
    ]
    assert [one["folded"] for one in world.checked] == [[[1.0, 1.0], [2.0, 2.0]]] * 2
    assert [one.name for one in found.statistics] == ["norm"]
    assert world.weights() == {"a": [-1.0, -1.0], "b": [-2.0, -2.0], "c": [-3.0, -3.0]}
    assert float(found.first.loss) == 1.0
    assert [float(loss) for loss in found.losses] == [1.0, 2.0]
    assert [(one.regions, one.weights.tolist()) for one in found.taught] == [((0, 1), [1.0, 1.0]), ((0, 1), [2.0, 2.0])]
    assert found.learnt == {"a", "b", "c"}
    assert found.figures.norms is not None
    assert found.figures.norms.tolist() == [[5.0, 5.0]] * 2, "of both, by Pythagoras"
    assert world.seen is not world.given


def test_a_turn_acts_in_the_steps_that_its_number_divides() -> None:
    for step, names in ((0, ["first", "second"]), (2, ["first"]), (3, ["first", "second"])):
        world = World({"first": 1, "second": 3}, BOTH)
        world.run(step)
        assert [one[1] for one in world.told if one[0] == "pass"] == names
        if len(names) == 1:
            assert world.seen is world.given


def test_a_batch_that_one_turn_changes_is_not_read_by_the_next() -> None:
    world = World({"first": 1, "second": 1}, BOTH)
    whole = world.passes

    def changes(step: StepInput, turn: Turn, due: DueDetails) -> StepGradients:
        step.batches[0].add_(1)  # type: ignore[attr-defined]
        return whole(step, turn, due)

    world.commits._passes = changes  # type: ignore[assignment]
    with pytest.raises(ValueError, match="The sub-step 'second' of step 4 would read other rows than were given"):
        world.run()


def test_what_is_frozen_learns_in_no_region() -> None:
    world = World({"first": 1}, BOTH)
    assert world.run(frozen=["b"]).taught[0].regions == (1,)
    assert World({"first": 1}, BOTH).run(frozen=["a"]).taught[0].regions == (0,)


def test_where_no_gradient_is_nothing_is_committed() -> None:
    world = World({"first": 1}, {"first": {}})
    found = world.run(due=DueDetails(update=True))
    assert [one[0] for one in world.told] == ["pass", "lap", "methods", "check"]
    assert (found.learnt, found.update) == (frozenset(), None)


@pytest.mark.parametrize("is_due", [True, False])
def test_an_update_is_measured_from_before_the_step_where_it_is_due(
    monkeypatch: pytest.MonkeyPatch, is_due: bool
) -> None:
    asked: list[Any] = []

    def since(layout: object, before: Pieces, sketch: object) -> str:
        asked.append((layout, {name: one.tolist() for name, one in before.tensors.items()}, sketch))
        return "the update"

    monkeypatch.setattr(commit, "update_since", since)
    world, sketch = World({"first": 1}, BOTH), object()
    found = world.run(due=DueDetails(update=is_due, update_sketch=sketch))  # type: ignore[arg-type]
    assert found.update == ("the update" if is_due else None)
    assert asked == ([(world.assembly.layout, {name: [0.0, 0.0] for name in NAMES}, sketch)] if is_due else [])


@pytest.mark.parametrize(
    ("given", "is_known"),
    [
        ({}, True),
        ({"is_finite": False}, False),
        ({"changes": True}, False),
        ({"change": lambda root: root.having(dict(root.tensors))}, False),
    ],
)
def test_gradients_are_known_to_be_finite_where_nobody_has_touched_them_since(
    given: dict[str, Any], is_known: bool
) -> None:
    world = World({"first": 1}, BOTH, **given)
    world.run()
    assert world.checked[0]["known"] is is_known


def test_the_gradients_that_methods_give_back_are_committed() -> None:
    world = World({"first": 1}, BOTH, change=lambda root: root.only(["b"]))
    assert world.run().learnt == {"b"}
    assert world.weights()["a"] == [0.0, 0.0]
    assert world.checked[0]["root"].names == ("b",)


def test_what_a_narrow_parameter_cannot_hold_is_infinite_before_it_is_looked_at() -> None:
    gradients = {"first": {"a": 1e6, "b": 1e6}}
    world = World({"first": 1}, gradients, kinds={"a": torch.float16})
    world.run()
    root = world.checked[0]["root"]
    assert root.tensors["a"].tolist() == [math.inf, math.inf]
    assert root.tensors["a"].dtype is torch.float32
    assert root.tensors["b"].tolist() == [1e6, 1e6]
    assert root.names == ("a", "b")
    assert world.checked[0]["known"] is False


def held(world: World, **tensors: Tensor) -> tuple[Pieces, Pieces]:
    root = Pieces(tensors)
    return root, world.commits._as_held(root)


def test_only_wide_gradients_of_narrow_parameters_are_rounded() -> None:
    world = World({"first": 1}, BOTH, kinds={"a": torch.float16})
    root, same = held(world, b=torch.tensor([1e6]), c=torch.tensor([1e6]))
    assert same is root
    root, same = held(world, a=torch.tensor([1e4], dtype=torch.float16))
    assert same is root
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1e6]), (2,), check_invariants=True)
    root, same = held(world, a=sparse)
    assert same is root
    root, own = held(world, a=torch.tensor([1.0, -1e6, 65504.0]), b=torch.tensor([1e6]))
    assert own is not root
    assert own.tensors["a"].tolist() == [1.0, math.inf, 65504.0]
    assert root.tensors["a"].tolist() == [1.0, -1e6, 65504.0]
    assert own.tensors["b"] is root.tensors["b"]


def test_where_a_later_turn_fails_weights_and_optimizers_are_as_they_were() -> None:
    world = World({"first": 1, "second": 1}, BOTH)
    world.run(0)
    weights = world.weights()
    states = [{id(p): own["momentum_buffer"].tolist() for p, own in o.state.items()} for o in world.optimizers.values()]
    buffers = [id(own["momentum_buffer"]) for o in world.optimizers.values() for own in o.state.values()]
    world.fails_at = "second"
    with pytest.raises(DivergenceError, match="the loss is nan"):
        world.run(1)
    assert world.weights() == weights
    again = [{id(p): own["momentum_buffer"].tolist() for p, own in o.state.items()} for o in world.optimizers.values()]
    assert again == states
    assert [o.param_groups[0]["count"] for o in world.optimizers.values()] == [1, 1]
    now = [id(own["momentum_buffer"]) for o in world.optimizers.values() for own in o.state.values()]
    assert now != buffers, "copies, since what was there has been written to"
    world.fails_at = ""
    world.run(1)
    assert world.weights()["a"] == [-2.5, -2.5], "1, then 1 and half of it: as if nothing had been"


def test_state_that_began_in_a_step_that_failed_is_gone() -> None:
    world = World({"first": 1, "second": 1}, BOTH, fails_at="second")
    with pytest.raises(DivergenceError):
        world.run()
    assert [dict(one.state) for one in world.optimizers.values()] == [{}, {}]
    assert world.weights() == {name: [0.0, 0.0] for name in NAMES}


def test_of_one_turn_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def remembers(_: Commit) -> Callable[[], None]:
        raise AssertionError

    monkeypatch.setattr(Commit, "_remember", remembers)
    World({"first": 1}, BOTH).run()
    with pytest.raises(DivergenceError):
        World({"first": 1}, BOTH, fails_at="first").run()
    with pytest.raises(AssertionError):
        World({"first": 1, "second": 5}, BOTH).run(1)


def test_what_an_optimizer_keeps_is_copied_where_it_is_a_tensor() -> None:
    tensor = torch.ones(2, requires_grad=True)
    copied = commit._copied(tensor)
    assert torch.equal(copied, tensor)
    assert not copied.requires_grad
    assert copied.data_ptr() != tensor.data_ptr()
    kept = [1]
    assert commit._copied(kept) is kept


def test_a_commit_is_made_of_an_assembly_and_its_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"first": 1}, BOTH, kinds={"b": torch.float16, "c": torch.bfloat16})
    made: list[Any] = []

    def passes(*given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(watch="the watch")

    monkeypatch.setattr(commit, "StepPasses", passes)
    methods: Any = SimpleNamespace(loss="loss")
    watch, tell = SimpleNamespace(), lambda _: None
    own = Commit(world.assembly, methods, watch, tell)  # type: ignore[arg-type]
    assert made == [(world.assembly, "loss", watch, tell)]
    assert own.watch == "the watch"  # type: ignore[comparison-overlap]
    assert own._halves == ["b"]
    assert (own._a, own._methods, own._stopwatch, own._tell) == (world.assembly, methods, watch, tell)
