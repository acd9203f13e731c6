"""A step's passes are looked at on their cadence: at classes' own, at packs, and at what ranks compute together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.core.meetings import MetAloneError
from cosmati.errors import OutOfMemoryError, PlanError
from cosmati.train import gradients
from cosmati.train.failures import RAN_ALONE, Failure
from cosmati.train.leaf_facts import NO_LEAF, LeafFacts
from cosmati.train.routes import Route
from tests.train.noting_passes import ROUTE, World, packs

FOUND = LeafFacts(1.0, 2.0, 3.0, 4.0, 5.0)


def tried(world: World, error: Exception | None, route: Route = ROUTE) -> tuple[LeafFacts, Failure]:
    failure = Failure(None)

    def run() -> LeafFacts:
        if error is not None:
            raise error
        return FOUND

    return world.passes._tried(run, route, failure, is_alone=False), failure


def test_what_a_microbatch_tells_is_handed_on_and_its_tokens_settle_it() -> None:
    world, route = World(), packs(0)
    assert tried(world, None, route)[0] is FOUND
    assert world.told == [("settled", route.tokens)]


def test_who_would_wait_alone_says_so() -> None:
    found, failure = tried(World(), MetAloneError())
    assert (found, failure.error) == (RAN_ALONE, None)


def test_only_who_runs_alone_is_kept_from_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(gradients, "meeting_nobody", lambda: world.noted("nobody"))
    for is_alone, expected in ((False, []), (True, [("in", "nobody"), ("out", "nobody")])):
        world.told.clear()
        world.passes._tried(lambda: FOUND, ROUTE, Failure(None), is_alone=is_alone)
        assert [one for one in world.told if one[0] != "settled"] == expected


def test_memory_that_is_short_is_told_without_what_did_not_fit() -> None:
    for can_tell in (False, True):
        error = torch.OutOfMemoryError("no room\nat all")
        found, failure = tried(World(can_tell=can_tell), error)
        assert found is NO_LEAF
        assert isinstance(failure.error, OutOfMemoryError)
        assert str(failure.error) == "no room"


def test_a_pass_in_lockstep_cannot_be_begun_anew() -> None:
    error = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError, match="no room") as raised:
        tried(World(in_lockstep=True), error)
    assert raised.value is error


def test_another_failure_is_raised_where_nobody_can_be_told() -> None:
    with pytest.raises(KeyError, match="lost"):
        tried(World(), KeyError("lost"))
    error = KeyError("lost")
    found, failure = tried(World(can_tell=True), error)
    assert found is NO_LEAF
    assert failure.error is error


def test_of_packs_the_busiest_slot_is_looked_at_once_a_step() -> None:
    world = World()
    routes = [ROUTE, packs(0), packs(), packs(1), packs(0), packs(0)._replace(offered=False)]
    assert world.passes._looked_at_now(world.step(*routes)) == frozenset({1, 3})
    assert world.passes._looked_at_now(world.step(*routes)) == frozenset()
    assert world.passes._looked_at_now(world.step(*routes, number=5)) == frozenset({1, 3})
    assert world.passes._looked_at_now(world.step(packs(0), packs(0)[:5] and ROUTE, number=6)) == frozenset({0})


def test_no_packs_are_looked_at_where_none_is_mixed_or_nobody_looks() -> None:
    world = World()
    assert world.passes._looked_at_now(world.step(ROUTE, packs())) == frozenset()
    assert world.passes._looked_at_now(world.step(packs(0))) == frozenset({0}), "the step wasn't looked at yet"
    world = World(is_on=False)
    assert world.passes._looked_at_now(world.step(packs(0))) == frozenset()
    world.watch.is_on = True
    assert world.passes._looked_at_now(world.step(packs(0))) == frozenset({0})


def test_what_is_offered_is_looked_at_for_what_is_another_classs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def read(model: object, loss: object, layout: object, forward: Any, batch: Any) -> str:
        assert (model, loss, layout) == (world.model, world.turn.loss, world.assembly.layout)
        result = forward(batch)
        assert float(result.weight) == 2.0
        return f"reads {batch.name}"

    monkeypatch.setattr(gradients, "foreign_read", read)
    monkeypatch.setattr(world.passes, "_look_at_packs", lambda *given: world.told.append(("packs", *given)))
    step = world.step(ROUTE._replace(offered=False), packs(0), ROUTE)
    world.passes._look(step, world.turn)
    told = [one for one in world.told if one[0] in ("read", "packs", "settled")]
    second = (step.batches[1], step.positions[1], world.turn, 0.25, step.routes[1])
    assert told == [
        ("read", "reads b1"),
        ("settled", step.routes[1].tokens),
        ("packs", *second),
        ("read", "reads b2"),
    ]
    assert world.told[0] == ("in", "draws")
    assert world.told[-1] == ("out", "draws")
    running = [one for one in world.told if "running" in str(one)]
    assert running == [(way, ("running", b)) for b in ("b1", "b2") for way in ("in", "out")]


@pytest.mark.parametrize(
    ("given", "looks"),
    [({}, 1), ({"can_tell": True}, 1), ({"is_on": False}, 0), ({"policy": None}, 0), ({"has_met": True}, 0)],
)
def test_a_governed_step_is_looked_at_where_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], looks: int
) -> None:
    world = World(**given)
    found: Any = SimpleNamespace()
    world.assembly.turns, world.passes._again = [None], ()
    world.assembly.layout.weights = lambda: None
    monkeypatch.setattr(world.passes, "_pass", lambda step, turn, due: world.told.append("pass") or found)
    step = world.step(ROUTE)

    def look(own: object, turn: object) -> None:
        assert (own, turn) == (step, world.turn)
        world.told.append("look")

    monkeypatch.setattr(world.passes, "_look", look)
    monkeypatch.setattr(gradients, "all_or_none", world.noted)
    assert world.passes(step, world.turn, gradients.DueDetails()) is found
    around = [("in", world.ranks)], [("out", world.ranks)]
    look = ["look"] * looks
    assert world.told == ["pass", *(around[0] + look + around[1] if given.get("can_tell") else look)]


@pytest.mark.parametrize(("degree", "num"), [(1, 0), (2, 1)])
def test_ranks_that_compute_together_are_compared(monkeypatch: pytest.MonkeyPatch, degree: int, num: int) -> None:
    world, found = World(degree=degree, is_on=False), SimpleNamespace()
    world.assembly.turns, world.passes._again = [None], ()
    world.assembly.layout.weights = lambda: None
    monkeypatch.setattr(world.passes, "_pass", lambda step, turn, due: found)
    monkeypatch.setattr(world.passes, "_compare", lambda step, turn: world.told.append(turn))
    world.passes(world.step(ROUTE), world.turn, gradients.DueDetails())
    assert world.told == [world.turn] * num


def test_ranks_are_compared_at_first_and_at_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    world, compared = World(), list[int]()

    def refuse(a: object, roots: object, objective: Callable[[Any], Any], batch: Any) -> None:
        assert (a, roots, batch.name) == (world.assembly, world.passes._roots, "b0")
        with torch.no_grad():
            expected = world.model(batch.data).sum() / 2
        assert torch.equal(objective(batch).detach(), expected)
        compared.append(number)

    monkeypatch.setattr(gradients, "refuse_unlike_parts", refuse)
    for number in (3, 4, 5, 6, 7, 8, 9, 0, 1, 2):
        world.passes._compare(world.step(ROUTE, number=number), world.turn)
    assert compared == [3, 4, 8, 0, 1, 2]


def test_documents_that_are_coupled_anyway_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, route = World(), packs(0)

    def couplings(methods: object, facts: object) -> tuple[str, ...]:
        assert (methods, facts) == ("the methods", "the facts")
        return ("MixUp couples rows", "and more")

    monkeypatch.setattr(gradients, "row_couplings", couplings)
    step = world.step(route)
    world.passes._look_at_packs(step.batches[0], step.positions[0], world.turn, 0.25, route)
    assert world.told == [("note", "MixUp couples rows")]


@pytest.mark.parametrize("fails", [False, True])
def test_a_look_at_documents_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    world, route = World(), packs(0)
    step = world.step(route)
    world.model.register_buffer("count", torch.zeros(1))

    def leak(probed: Callable[..., Any], batch: Any, *among: object) -> str:
        assert among == (route.tokens, "the parameters", world.passes._apart, frozenset({"zeroed"}))
        with world.noted("masks") as masks:
            assert masks is None
        expected = world.model(batch.data).sum() / 4
        assert torch.equal(probed(batch, None), expected)
        world.model.get_buffer("count").add_(1)
        if fails:
            raise PlanError("it can't be")
        return "they leak"

    monkeypatch.setattr(gradients, "row_couplings", lambda methods, facts: ())
    monkeypatch.setattr(gradients, "leak_between_documents", leak)
    given = step.batches[0], step.positions[0], world.turn, 0.25, route
    if fails:
        with pytest.raises(PlanError, match="it can't be"):
            world.passes._look_at_packs(*given)
    else:
        world.passes._look_at_packs(*given)
        assert ("note", "they leak") in world.told
    assert float(world.model.get_buffer("count")) == 0.0


@dataclass
class Slot:
    """Notes what is differentiated."""

    told: list[Any]

    def backward(self, objective: torch.Tensor, *, is_final: bool) -> None:
        self.told.append(("backward", float(objective.detach()), is_final))


class Masks:
    """Stands around a forward pass and its way back."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __enter__(self) -> None:
        self.world.told.append("masks on")

    def __exit__(self, *given: object) -> None:
        self.world.told.append("masks off")

    def differentiating(self, objective: torch.Tensor) -> Any:
        return self.world.noted("differentiating")


def microbatch(world: World, route: Route, monkeypatch: pytest.MonkeyPatch, *, masks: bool) -> LeafFacts:
    def masking(tokens: object, batch: Any, parameters: object, apart: object, *, zeroed: object) -> Masks | None:
        assert (tokens, batch.name, parameters) == (route.tokens, "b0", "the parameters")
        assert (apart, zeroed) == (world.passes._apart, frozenset({"zeroed"}))
        return Masks(world) if masks else None

    monkeypatch.setattr(gradients, "masking", masking)
    step = world.step(route)

    def by_class(model: object, batch: object, num: int) -> torch.Tensor:
        assert (model, batch) == (world.model, step.batches[0])
        return torch.full((num,), 7.0)

    monkeypatch.setattr(gradients, "count_labels_by_class", by_class)
    with torch.no_grad():
        world.model.weight.fill_(2.0)
        assert world.model.bias is not None
        world.model.bias.fill_(0.0)
    slot: Any = Slot(world.told)
    return world.passes._microbatch(slot, step.batches[0], step.positions[0], world.turn, 0.5, route)


def test_a_microbatch_of_one_class_is_differentiated_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    found = microbatch(world, ROUTE, monkeypatch, masks=False)
    assert (float(found.loss), found.weight, found.num_rows) == (4.0, 2.0, 2.0)
    assert (found.num_labels, found.label_key, found.failure, found.labels) == (0.0, 0.0, 0.0, None)
    assert world.told == [
        ("in", ("around", "b0", 0)),
        ("in", "counting"),
        ("in", "the device"),
        ("out", "the device"),
        ("out", "counting"),
        ("tell", "forward"),
        ("look", 2.0),
        ("in", "counting"),
        ("backward", 2.0, True),
        ("out", "counting"),
        ("out", ("around", "b0", 0)),
    ]
    assert list(world.passes._stopwatch.seconds) == ["forward"]


def test_a_microbatch_of_packs_is_masked_and_may_be_differentiated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    found = microbatch(world, packs(0), monkeypatch, masks=True)
    assert found.labels is not None
    assert found.labels.tolist() == [7.0, 7.0]
    names = [one for one in world.told if one in ("masks on", "masks off") or one[0] == "backward"]
    assert names == ["masks on", "masks off", ("backward", 2.0, False)]
    at = world.told.index(("backward", 2.0, False))
    assert world.told[at - 1] == ("in", "differentiating")
    assert world.told[at + 1] == ("out", "differentiating")
    assert not [one for one in world.told if one[0] == "read"]


def test_what_a_loss_adds_beside_masks_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for masks in (True, False):
        world = World()
        own = world.turn.loss
        world.turn.loss = lambda m, d, own=own: replace(own(m, d), aux={"b": m.weight.sum(), "a": m.weight.sum()})
        microbatch(world, packs(0), monkeypatch, masks=masks)
        noted = [one[1] for one in world.told if one[0] == "read"]
        assert [one.partition(" is ")[0] for one in noted] == ["in packs, what the loss adds (a, b)"] * masks


def test_compiled_blocks_cannot_be_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="compile_blocks=False"):
        microbatch(World(compiles=True), packs(0), monkeypatch, masks=True)
    assert microbatch(World(compiles=True), ROUTE, monkeypatch, masks=False).weight == 2.0


def test_a_bare_scalar_tells_how_many_labels_it_may_be_the_mean_of(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.turn.loss = lambda model, data: model(data).mean()
    monkeypatch.setattr(gradients, "count_labels", lambda model, data: (11.0, 12.0) if model is world.model else data)
    found = microbatch(world, ROUTE, monkeypatch, masks=False)
    assert (found.weight, found.num_labels, found.label_key) == (1.0, 11.0, 12.0)
