"""The methods of a plan at work, without a trainer: in order, with own states, only where they have a hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from cosmati.core.batch import Batch, Data
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Loss, LossFunction
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.pieces import Pieces
from cosmati.core.plan import Facts, Plan, make_plan
from cosmati.core.rng import DefaultGenerators, position_key
from cosmati.errors import BatchError, PlanError
from cosmati.routing.policy import CompiledPolicy
from cosmati.train import applied as applied_module
from cosmati.train.applied import AppliedMethods
from tests.train.hand_made import POLICY, rows

WEIGHTS = Pieces({"a": torch.tensor([1.0]), "b": torch.tensor([2.0])})
CPU = torch.device("cpu")
MODEL = nn.Identity()


def _user_loss(model: nn.Module, data: Data) -> Loss:
    return Loss(torch.zeros(()), 1.0)


def _plan(*methods: Method) -> Plan:
    return make_plan(methods, Facts(num_microbatches=2, rows_per_microbatch=2, positional_data=True))


def _applied(*methods: Method) -> tuple[AppliedMethods, list[str]]:
    events: list[str] = []
    return AppliedMethods(_plan(*methods), WEIGHTS, DefaultGenerators(CPU), events.append), events


def _at(step: int = 4, microbatch: int = 1) -> Position:
    return Position(Clock(step=step), Budget(Time.parse("9ba")), 3, microbatch, MODEL, _user_loss)


@dataclass(frozen=True, kw_only=True)
class Bare(Method):
    """Has no hook at all."""

    stage: ClassVar[Stage] = Stage.AVERAGE


@dataclass(frozen=True, kw_only=True)
class AddsRows(Method):
    """Adds to the rows what it draws."""

    stage: ClassVar[Stage] = Stage.PERTURB

    def batch(self, batch: Batch, at: Position) -> Batch:
        return Batch(batch.data + torch.rand(()), batch.lineage)


@dataclass(frozen=True, kw_only=True)
class Doubles(Method):
    """Doubles rows, losses and gradients."""

    stage: ClassVar[Stage] = Stage.MIX

    def batch(self, batch: Batch, at: Position) -> Batch:
        return Batch(2 * batch.data, batch.lineage)


@dataclass(frozen=True, kw_only=True)
class Chooses(Method):
    """Keeps the first row."""

    stage: ClassVar[Stage] = Stage.SELECT

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch.select(slice(0, 1))


@dataclass(frozen=True, kw_only=True)
class Around(Method):
    """Writes its name and its state around a loss."""

    name: str
    stage: ClassVar[Stage] = Stage.LOSS

    def init(self, weights: Pieces) -> State:
        return {"name": torch.tensor(float(len(self.name)))}

    def loss(self, loss: LossFunction, state: State, at: Position) -> LossFunction:
        def wrapped(model: nn.Module, data: Data) -> Loss:
            inner = loss(model, data)
            aux = {**inner.aux, self.name: state["name"] + at.microbatch}
            return Loss(inner.sum, inner.weight, aux=aux)

        return wrapped


@dataclass(frozen=True, kw_only=True)
class Freezes(Method):
    """Lets one parameter rest from a step on."""

    name: str
    since: int
    stage: ClassVar[Stage] = Stage.ROUTE

    def frozen(self, parameters: Sequence[str], at: Position) -> frozenset[str]:
        assert tuple(parameters) == ("a", "b")
        return frozenset({self.name}) if at.clock.step >= self.since else frozenset()


@dataclass(frozen=True, kw_only=True)
class Changes(Method):
    """Multiplies gradients by the weights and adds."""

    add: float
    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        assert not torch.is_grad_enabled()
        return gradients.map(lambda gradient, weight: gradient * weight + self.add, weights)


@dataclass(frozen=True, kw_only=True)
class Again(Method):
    """Asks for a second pass."""

    stage: ClassVar[Stage] = Stage.AGAIN

    def perturbation(self, weights: Pieces, gradients: Pieces, at: Position) -> Pieces | None:
        return None


@dataclass(frozen=True, kw_only=True)
class Counts(Method):
    """Counts commits by so many, and keeps what has learnt."""

    by: int
    stage: ClassVar[Stage] = Stage.AVERAGE

    def init(self, weights: Pieces) -> State:
        return {"count": torch.tensor(sum(float(weight) for weight in weights.tensors.values()))}

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        return {"count": state["count"] + self.by * at.clock.step + len(learnt or ())}


def test_without_hooks_nothing_changes_and_nobody_is_told() -> None:
    applied, events = _applied(Bare())
    batch, gradients = rows(0, 1), Pieces({"a": torch.ones(1)})
    assert applied.batch(batch, _at()) is batch
    assert applied.loss(_user_loss, _at()) is _user_loss
    assert applied.gradients(gradients, _at()) is gradients
    assert applied.frozen(_at()) == frozenset()

    def nobody_asks() -> Position:
        raise AssertionError

    applied.after(nobody_asks, frozenset({"a"}))
    assert (events, applied.states) == ([], {0: {}})


@pytest.mark.parametrize(
    ("method", "flags"),
    # changes batches, losses, gradients; needs the road of microbatches
    [
        (Bare(), (False, False, False, False)),
        (Doubles(), (True, False, False, False)),
        (Chooses(), (True, False, False, True)),
        (Around(name="x"), (False, True, False, False)),
        (Changes(add=1), (False, False, True, False)),
        (Freezes(name="a", since=0), (False, False, False, True)),
        (Again(), (False, False, False, True)),
        (Counts(by=1), (False, False, False, False)),
    ],
)
def test_only_hooks_that_a_method_has_are_asked_for(method: Method, flags: tuple[bool, ...]) -> None:
    a, _ = _applied(Bare(), method)
    assert (a.change_batches, a.change_losses, a.change_gradients, a.need_microbatches) == flags


def test_batch_methods_act_in_the_order_of_their_stages_with_draws_of_the_position() -> None:
    applied, events = _applied(Doubles(), AddsRows(), Chooses())
    generator = torch.Generator().manual_seed(position_key(3, "prepare", 4, 1))
    drawn = torch.rand((), generator=generator)
    for _ in range(2):
        torch.rand(3)  # whatever was drawn before
        changed = applied.batch(rows(5, 6), _at())
        assert changed.lineage.row_ids.tolist() == [5]
        assert torch.equal(changed.data, (2 * drawn).view(1, 1))
    assert events == ["select", "perturb", "mix"] * 2
    other = applied.batch(rows(5, 6), _at(microbatch=0))
    assert not torch.equal(other.data, (2 * drawn).view(1, 1))


def test_where_no_method_draws_the_generators_are_left_alone() -> None:
    applied, _ = _applied(Counts(by=1))
    before = torch.get_rng_state()
    applied.batch(rows(0), _at())
    assert torch.equal(torch.get_rng_state(), before)


def test_loss_methods_wrap_in_order_each_with_its_own_state() -> None:
    applied, events = _applied(Around(name="x"), Bare(), Around(name="yyy"))
    aux = applied.loss(_user_loss, _at(microbatch=1))(MODEL, None).aux
    assert [(name, float(value)) for name, value in aux.items()] == [("x", 2.0), ("yyy", 4.0)]
    assert events == ["loss", "loss"]
    applied.states[1] = {"name": torch.tensor(10.0)}
    assert [float(value) for value in applied.loss(_user_loss, _at(microbatch=0))(MODEL, None).aux.values()] == [1, 10]


def test_what_rests_is_what_any_method_says() -> None:
    applied, events = _applied(Freezes(name="b", since=2), Freezes(name="a", since=5))
    resting = [applied.frozen(_at(step)) for step in (1, 2, 5)]
    assert resting == [frozenset(), frozenset({"b"}), frozenset({"a", "b"})]
    assert events == []


def test_gradient_methods_act_in_order_on_the_weights() -> None:
    applied, events = _applied(Changes(add=1.0), Changes(add=10.0))
    gradients = Pieces({"a": torch.tensor([3.0]), "b": torch.tensor([5.0], requires_grad=True)})
    changed = applied.gradients(gradients, _at())
    # a: (3 * 1 + 1) * 1 + 10, b: (5 * 2 + 1) * 2 + 10
    assert {name: float(value) for name, value in changed.tensors.items()} == {"a": 14.0, "b": 32.0}
    assert events == ["gradients"], "one event for all"
    assert torch.is_grad_enabled()


def test_states_follow_a_commit_each_its_own() -> None:
    applied, events = _applied(Counts(by=10), Bare(), Counts(by=1))
    assert {i: float(s["count"]) for i, s in applied.states.items() if s} == {0: 3.0, 2: 3.0}
    asked = []
    position: Callable[[], Position] = lambda: asked.append(1) or _at(4)  # noqa: E731
    applied.after(position, frozenset({"a"}))
    assert {i: float(s["count"]) for i, s in applied.states.items() if s} == {0: 44.0, 2: 8.0}
    applied.after(position, None)
    assert {i: float(s["count"]) for i, s in applied.states.items() if s} == {0: 84.0, 2: 12.0}
    assert events == ["after"] * 4


@dataclass(frozen=True, kw_only=True)
class Loses(Method):
    """Gives other rows under no lineage that is theirs, or the same batch."""

    same: bool
    stage: ClassVar[Stage] = Stage.PERTURB

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch if self.same else Batch(batch.data[:1], batch.lineage)


@pytest.mark.parametrize("policy", [None, POLICY])
def test_under_a_policy_a_method_that_loses_track_of_its_rows_is_refused(policy: CompiledPolicy | None) -> None:
    applied = AppliedMethods(_plan(Loses(same=False)), WEIGHTS, DefaultGenerators(CPU), lambda _: None, policy=policy)
    if policy is None:
        assert len(applied.batch(rows(0, 1), _at()).data) == 1
    else:
        with pytest.raises((PlanError, BatchError), match="Loses"):
            applied.batch(rows(0, 1), _at())


def test_what_is_given_back_as_it_was_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(applied_module, "refuse_unfollowed", lambda *given: looked.append(given))
    same, other = Loses(same=True), Loses(same=False)
    applied = AppliedMethods(_plan(same), WEIGHTS, DefaultGenerators(CPU), lambda _: None, policy=POLICY)
    batch = rows(0, 1)
    assert applied.batch(batch, _at()) is batch
    assert looked == []
    applied = AppliedMethods(_plan(other), WEIGHTS, DefaultGenerators(CPU), lambda _: None, policy=POLICY)
    made = applied.batch(batch, _at())
    assert looked == [(batch, made, other)]


@dataclass(frozen=True, kw_only=True)
class Decays(Method):
    """Takes the weights from the gradients."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        assert at.microbatch == 1
        return gradients.map(lambda gradient, weight: gradient - weight, weights)


def test_a_gradient_method_is_given_the_weights_of_these_gradients() -> None:
    applied, _ = _applied(Decays())
    changed = applied.gradients(Pieces({"b": torch.tensor([5.0])}), _at())
    assert {name: float(value) for name, value in changed.tensors.items()} == {"b": 3.0}


@dataclass(frozen=True, kw_only=True)
class Forgets(Method):
    """Returns a dictionary where `Pieces` are due."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return dict(gradients.tensors)  # type: ignore[return-value]


def test_gradients_that_are_no_pieces_are_refused_with_the_method_s_name() -> None:
    applied, _ = _applied(Forgets())
    with pytest.raises(PlanError, match=r"^Forgets\.gradients returned a dict, and the loop takes `Pieces`: return"):
        applied.gradients(WEIGHTS, _at())


def test_a_method_around_passes_needs_microbatches() -> None:
    class Plain:
        methods: ClassVar[tuple[Method, ...]] = (Bare(), Bare())

        def with_hook(self, hook: str) -> tuple[Method, ...]:
            return self.methods if hook == asked else ()

    for asked in ("frozen", "perturbation", "passing", "after"):
        plan: Any = Plain()
        applied = AppliedMethods(plan, WEIGHTS, DefaultGenerators(CPU), lambda _: None)
        assert applied.need_microbatches is (asked != "after")
        assert (applied._freezing, applied._after) == ([0, 1] * (asked == "frozen"), [0, 1] * (asked == "after"))
