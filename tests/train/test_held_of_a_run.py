"""A snapshot holds everything of a run once, under names that tell whose it is, and a restore gives each its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Clock
from cosmati.core.plan import Facts, make_plan
from cosmati.core.state import optimizer_tensors
from cosmati.routing.regions import partition_parameters
from cosmati.train.assembly import Assembly, ScheduledOptimizer, Turn
from cosmati.train.deferred_rows import DeferredRows
from cosmati.train.layout.span import HeldSpan
from cosmati.train.layout.whole import Whole
from cosmati.train.observers import Observer
from cosmati.train.ranks import Ranks
from cosmati.train.run.checkpoints import Checkpoint, whole
from cosmati.train.run.parts import HeldState
from cosmati.train.snapshot import restore, snapshot, with_observers
from tests.train.hand_made import POLICY

CLOCK = Clock(step=3, epoch=1, step_in_epoch=1, rows=12, tokens=24, seconds=1.5)
FACTS = Facts(num_microbatches=2, rows_per_microbatch=2, positional_data=True)


class Criterion(nn.Module):
    """A loss that counts."""

    def __init__(self, seen: float) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((2,), seen))

    def forward(self, model: nn.Module, data: Tensor) -> Tensor:
        return model(data).sum() + self.seen.sum()  # type: ignore[no-any-return,operator]


class Fed:
    """Data that keep a tensor and a number of their own."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.told: list[Any] = []

    def state(self) -> Mapping[str, Any]:
        return {"place": self.place, "drawn": torch.full((2,), float(self.place))}

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        self.told.append((state["place"], state["drawn"].tolist(), clock))


class Cut(Whole):
    """Says that ranks hold pieces."""

    is_cut = True


class Asked(Whole):
    """Notes whose state it's asked for."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.asked: list[tuple[list[str], bool]] = []

    def held_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, HeldSpan]:
        self.asked.append((sorted(tensors), of_optimizers))
        return super().held_state(tensors, of_optimizers=of_optimizers)

    def own_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        self.asked.append((sorted(tensors), of_optimizers))
        return super().own_state(tensors, of_optimizers=of_optimizers)


def assembled(value: float, *, rank: int = 0, kind: type[Whole] = Whole, num_methods: int = 2) -> Assembly:
    """A model with two optimizers, each of which has taken a step, and two losses; everything follows from a value."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    model.register_buffer("mean", torch.full((2,), value))
    for parameter in model.parameters():
        parameter.data.fill_(value)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(model[0].parameters(), lr=value), torch.optim.SGD(model[1].parameters(), lr=value, momentum=1)
    ]  # fmt: skip
    turns = []
    for index, (optimizer, parameter) in enumerate(zip(optimizers, model.parameters(), strict=True)):
        parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        parameter.grad = None
        scheduled = ScheduledOptimizer(optimizer, None, (value,), frozenset({index}))
        turns.append(Turn(f"turn {index}", Criterion(value + index), {index: f"{index}.weight"}, (scheduled,)))
    ranks = Ranks.alone()
    waiting = DeferredRows(POLICY, [0, 1, 2], is_told=True)
    waiting.restore({"late": torch.tensor([int(value), 99])})
    plan: Any = dataclasses.replace(make_plan([], FACTS), methods=tuple(SimpleNamespace() for _ in range(num_methods)))
    given: dict[str, Any] = {field.name: None for field in dataclasses.fields(Assembly)} | {
        "model": model,
        "layout": kind(model, partition_parameters(model), ranks, 2),
        "turns": tuple(turns),
        "ranks": SimpleNamespace(rank=rank),
        "device": torch.device("cpu"),
        "plan": plan,
        "deferred_rows": waiting,
    }
    return Assembly(**given)


def states(value: float) -> dict[int, Any]:
    return {0: {"mean": torch.full((3,), value)}, 1: {}}


def taken(assembly: Assembly, feed: Any = None, about: Mapping[str, Any] | None = None) -> HeldState:
    return snapshot(assembly, states(4.0), CLOCK, assembly.plan, feed, about)


OF_EACH = {
    "optimizer/0/0.weight/step", "optimizer/0/0.weight/exp_avg", "optimizer/0/0.weight/exp_avg_sq",
    "optimizer/1/1.weight/momentum_buffer", "method/0/mean",
}  # fmt: skip
OF_THE_FIRST = {"feed/drawn", "deferred/late", "loss/0.seen", "loss/1.seen"}


def test_everything_is_held_under_a_name_that_tells_whose_it_is() -> None:
    assembly, feed = assembled(2.0), Fed(5)
    held = taken(assembly, feed, {"more": 1, "feed": "told otherwise"})
    assert held.step == 3
    assert held.model.keys() == {"0.weight", "1.weight", "mean"}
    assert held.state.keys() == OF_EACH | OF_THE_FIRST
    assert all(span.start == 0 and span.shape == tuple(span.tensor.shape) for span in held.state.values())
    assert held.state["feed/drawn"].tensor.tolist() == [5.0, 5.0]
    assert held.state["deferred/late"].tensor.tolist() == [2, 99]
    assert (held.state["loss/0.seen"].tensor[0], held.state["loss/1.seen"].tensor[0]) == (2.0, 3.0)
    assert held.state["method/0/mean"].tensor.tolist() == [4.0] * 3
    assert (held.facts["clock"], held.facts["more"]) == ([3, 1, 1, 12, 24, 1.5], 1)
    assert held.facts["feed"] == "told otherwise", "what is told about it comes last"
    assert [one["groups"][0]["lr"] for one in held.facts["optimizers"]] == [2.0, 2.0]
    assert held.facts["withdrawn"] == [[g.name, g.because] for g in assembly.plan.guarantees if not g.holds]
    assert held.facts["withdrawn"] != []


def test_what_goes_on_counting_in_place_is_copied() -> None:
    assembly = assembled(2.0)
    held = taken(assembly)
    for turn in assembly.turns:
        turn.loss.seen.fill_(9.0)  # type: ignore[attr-defined]
    assert held.state["loss/0.seen"].tensor.tolist() == [2.0, 2.0]
    assert held.facts["feed"] == {}
    assert not any(name.startswith("feed/") for name in held.state)
    assert "more" not in held.facts


@pytest.mark.parametrize(("rank", "kind"), [(0, Whole), (1, Whole), (0, Cut), (1, Cut)])
def test_what_is_not_cut_is_the_first_ranks_where_each_writes_its_part(rank: int, kind: type[Whole]) -> None:
    held = taken(assembled(2.0, rank=rank, kind=kind), Fed(5))
    assert held.state.keys() == OF_EACH | (set() if rank and kind is Cut else OF_THE_FIRST)
    assert held.facts["feed"]["place"] == 5, "facts are every rank's"


def test_a_layout_is_told_whose_each_state_is() -> None:
    first, other = assembled(2.0, kind=Asked), assembled(7.0, kind=Asked)
    restore(a_copy(taken(first)), other, None)
    adam = [f"0.weight/{name}" for name in ("exp_avg", "exp_avg_sq", "step")]
    whose = [(adam, True), (["1.weight/momentum_buffer"], True), (["mean"], False), ([], False)]
    for assembly in (first, other):
        layout: Any = assembly.layout
        assert layout.asked == whose


class Keeps(Observer):
    """Keeps a tensor and a number."""

    def __init__(self, *kept: float) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"seen": torch.tensor(self.kept), "num": len(self.kept)} if self.kept else {}


@pytest.mark.parametrize(("rank", "kind"), [(0, Whole), (1, Whole), (0, Cut), (1, Cut)])
def test_observers_are_kept_beside_what_was_taken(rank: int, kind: type[Whole]) -> None:
    one: Any = HeldState(3, {"w": HeldSpan.of(torch.ones(1))}, {"s": HeldSpan.of(torch.ones(1))}, {"a": 1})
    assembly = assembled(2.0, rank=rank, kind=kind)
    found = with_observers(one, [Keeps(1.0, 2.0), Keeps(), Keeps(3.0)], assembly)
    own = set() if rank and kind is Cut else {"observer/Keeps/seen", "observer/Keeps 3/seen"}
    assert found.state.keys() == {"s"} | own
    assert {name: found.state[name].tensor.tolist() for name in own} == (
        {"observer/Keeps/seen": [1.0, 2.0], "observer/Keeps 3/seen": [3.0]} if own else {}
    )
    assert found.facts.keys() == {"a", "observers"}
    assert [found.facts["observers"][name]["num"] for name in ("Keeps", "Keeps 3")] == [2, 1]
    assert (found.step, found.model) == (3, one.model)
    assert (one.state.keys(), one.facts) == ({"s"}, {"a": 1}), "what was taken is as it was"


@pytest.mark.parametrize("observers", [[], [Keeps()]])
def test_where_no_observer_keeps_anything_nothing_is_added(observers: list[Observer]) -> None:
    one = HeldState(3, {}, {}, {})
    assert with_observers(one, observers, assembled(2.0)) is one


# ------------------------------------------------------------------------------------------------------------ restore


def optimizers_of(assembly: Assembly) -> list[Any]:
    names = {id(parameter): name for name, parameter in assembly.model.named_parameters()}
    found = [optimizer_tensors(one.optimizer, names) for one in assembly.optimizers]
    return [({name: value.tolist() for name, value in own.items()}, facts) for own, facts in found]


def a_copy(held: HeldState) -> Checkpoint:
    checkpoint = whole(held)
    model, state = ({n: v.clone() for n, v in own.items()} for own in (checkpoint.model, checkpoint.state))
    return dataclasses.replace(checkpoint, model=model, state=state)


def test_a_restore_puts_back_what_was_held_and_returns_the_rest() -> None:
    first, other, feed = assembled(2.0), assembled(7.0, num_methods=3), Fed(0)
    plan = first.plan.withdraw("resume", "a reason")  # type: ignore[arg-type]
    checkpoint = a_copy(snapshot(first, states(4.0), CLOCK, plan, Fed(5)))  # type: ignore[arg-type]
    found = restore(checkpoint, other, feed)  # type: ignore[arg-type]
    assert {n: v.tolist() for n, v in other.model.state_dict().items()} == {
        n: v.tolist() for n, v in first.model.state_dict().items()
    }
    assert optimizers_of(other) == optimizers_of(first)
    assert [turn.loss.seen.tolist() for turn in other.turns] == [[2.0, 2.0], [3.0, 3.0]]  # type: ignore[attr-defined]
    assert other.deferred_rows.state()["late"].tolist() == [2, 99]
    assert feed.told == [(5, [5.0, 5.0], CLOCK)]
    assert found.clock == CLOCK
    # Every method of the plan has a state, those that had nothing to keep an empty one.
    assert {i: {n: v.tolist() for n, v in own.items()} for i, own in found.states.items()} == {
        0: {"mean": [4.0] * 3}, 1: {}, 2: {},
    }  # fmt: skip
    assert not found.plan.holds("resume")  # type: ignore[arg-type]
    assert other.plan.holds("resume")  # type: ignore[arg-type]
    assert found.plan.guarantees == plan.guarantees


def test_without_data_there_is_nothing_to_place() -> None:
    first = assembled(2.0)
    assert restore(a_copy(taken(first, Fed(5))), assembled(7.0), None).clock == CLOCK
