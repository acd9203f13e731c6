"""A change of a policy without a stop is refused where only a resume could make it, and a resume goes on with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati import InMemory, load_policy
from cosmati.errors import CheckpointError, CosmatiError, PolicyError
from cosmati.train import policy_watch
from cosmati.train.facts import PolicyChanges
from tests.train.hand_made import POLICY as HAND_MADE
from tests.train.policy_world import AFTER, BEFORE, POLICY, ROWS
from tests.train.watched_policy import HALF, World, policy


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@dataclass(frozen=True)
class Kept:
    """A checkpoint's step and facts."""

    step: int
    facts: Mapping[str, Any]


class TestResume:
    """A resume goes on with what the ledger has recorded."""

    def resume(self, world: World, logged: list[dict[str, Any]], kept: Kept | None, given: str = "p") -> None:
        world.watch.recorded = logged
        checkpoint: Any = kept
        world.watch.resume(world.run, world.continuity, checkpoint, given)

    def test_a_run_that_begins_has_all_its_changes_to_come(self, world: World) -> None:
        logged = [world.change(1), world.change(6, HALF)]
        self.resume(world, logged, None)
        assert world.continuity.policy_changes == logged
        assert world.told == [("restate", {"policy_changes": PolicyChanges(tuple(logged))})]
        assert [world.watch._is_due(step) for step in (0, 1, 2, 6)] == [False, True, False, False]

    def test_changes_up_to_the_checkpoint_are_made_and_the_last_one_acts(self, world: World) -> None:
        made = [world.change(2), world.change(5, HALF)]
        logged = [*made, world.change(6)]
        kept = Kept(5, {"policy_changes": [*made, world.change(6, HALF)], "identity": {"policy": "p"}})
        self.resume(world, logged, kept)
        assert world.continuity.policy_changes == logged
        assert world.weights_at(5) == [(0.5, 0.5)] * 3
        assert [one[0] for one in world.told] == ["go by", "restate", "restate"]
        assert set(world.told[1][1]) == {"policy", "policy_text", "vouched_policy"}
        assert world.watch._is_due(6)

    def test_a_checkpoint_without_changes_leaves_the_policy(self, world: World) -> None:
        before = world.weights_at(5)
        self.resume(world, [], Kept(5, {"identity": {"policy": "p"}}))
        assert world.weights_at(5) == before
        assert [one[0] for one in world.told] == ["restate"]

    def test_another_policy_takes_the_place_of_what_was_made(self, world: World) -> None:
        kept = Kept(5, {"policy_changes": [world.change(2)], "identity": {"policy": "q"}})
        self.resume(world, [world.change(2), world.change(6)], kept)
        assert [one["step"] for one in world.continuity.policy_changes] == [6]
        assert [one[0] for one in world.told] == ["restate"]
        assert world.watch._is_due(6)

    def test_another_policy_is_not_given_while_the_folder_says_one_is_to_come(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Path] = []

        def logged(folder: Path) -> list[dict[str, Any]]:
            asked.append(folder)
            return [world.change(6)]

        monkeypatch.setattr(policy_watch, "policy_changes_in", logged)
        kept: Any = Kept(5, {"identity": {"policy": "q"}})
        with pytest.raises(CheckpointError, match=r"acts from step 6 on, and the run is at step 5\."):
            world.watch.resume(world.run, world.continuity, kept, "p")
        assert asked == [world.folder]
        kept = Kept(6, {"identity": {"policy": "q"}})
        world.watch.resume(world.run, world.continuity, kept, "p")
        world.a.ranks.rank = 1
        world.watch.resume(world.run, world.continuity, kept, "p")
        assert len(asked) == 2, "the first rank reads, and tells"

    def test_a_policy_that_the_run_took_up_by_itself_is_not_given(self, tmp_path: Path) -> None:
        world = World(tmp_path, AFTER)
        logged, kept = [world.change(2, HALF), world.change(4)], Kept(5, {"identity": {"policy": "q"}})
        with pytest.raises(CheckpointError, match=r"taken this policy up by itself, from step 4 on"):
            self.resume(world, logged, kept)
        config = replace(world.a.config, change=("policy",))
        world.watch._given = replace(world.watch._given, config=config)
        self.resume(world, logged, kept)
        world.watch._given = replace(world.watch._given, config=replace(config, change=("budget",)))
        self.resume(world, logged[:1], kept)


class TestForAResume:
    """What the order of the rows, or the model as it was cut, doesn't allow."""

    def refuse(self, world: World, text: str, begin: int = 5) -> None:
        assert world.a.policy is not None
        world.watch._refuse_for_a_resume(world.a.policy, world.watch._compiled(policy(text)), begin)

    def test_a_change_acts_before_the_end(self, world: World) -> None:
        self.refuse(world, AFTER, 11)
        with pytest.raises(PolicyError, match="would act from step 12 on, and the run ends before it"):
            self.refuse(world, AFTER, 12)

    def test_the_model_is_cut_as_it_was(self, world: World) -> None:
        other = POLICY.replace('params: ["0.*"]', 'params: ["0.*", "2.bias"]').replace("2.*", "2.weight")
        new = world.watch._compiled(load_policy(other + AFTER))
        assert world.a.policy is not None
        assert new.regions == world.a.policy.regions
        with pytest.raises(PolicyError, match="other regions than the run has"):
            world.watch._refuse_for_a_resume(world.a.policy, new, 5)

    PHASES = "phases: [{{name: one, until: {0}ba}}, {{name: two}}]\nrules:\n"
    DEFERS = PHASES + ('  - {{class: "**", phase: "*", weight: 1}}\n  - {{class: warm, phase: one, decision: defer}}\n')

    def test_no_rows_are_put_off_that_were_not(self, world: World) -> None:
        with pytest.raises(PolicyError, match="defers warm from step 5 on, and did not"):
            self.refuse(world, self.DEFERS.format(6))
        self.refuse(world, self.DEFERS.format(5))

    @pytest.mark.parametrize("until", [9, 10])
    def test_rows_that_were_to_come_by_now_are_not_put_off_further(self, tmp_path: Path, until: int) -> None:
        world = World(tmp_path, self.DEFERS.format(8))
        with pytest.raises(PolicyError, match="defers warm from step 8 on, and did not"):
            self.refuse(world, self.DEFERS.format(until))

    def test_what_is_found_is_held_against_what_is_in_force(self, tmp_path: Path) -> None:
        world, waits = World(tmp_path), self.DEFERS.format(8)
        with pytest.raises(PolicyError, match="defers warm from step 5 on, and did not"):
            world.watch._allowed(policy(waits), 4, world.continuity)
        other = World(tmp_path / "other", waits)
        assert other.watch._allowed(policy(BEFORE), 4, other.continuity) is not None

    def test_rows_that_wait_already_may_wait_on(self, tmp_path: Path) -> None:
        world = World(tmp_path, self.DEFERS.format(8))
        self.refuse(world, self.DEFERS.format(7))
        self.refuse(world, self.DEFERS.format(8))
        with pytest.raises(PolicyError, match="defers warm from step 8 on"):
            self.refuse(world, self.DEFERS.format(9), 8)

    @pytest.mark.parametrize("begin", [5, 8])
    def test_a_class_without_rows_in_the_order_is_not_admitted(self, tmp_path: Path, begin: int) -> None:
        never = BEFORE + "  - {class: hot, decision: reject}\n"
        world = World(tmp_path, never)
        self.refuse(world, never.replace("0.5", "0.25"))
        later = self.PHASES.format(8) + (
            '  - {class: "**", phase: "*", weight: 1}\n  - {class: hot, phase: one, decision: reject}\n'
        )
        gated = later.replace("weight: 1}", "weight: 0.5}")
        for text in (BEFORE, later, gated):
            with pytest.raises(PolicyError, match="admits hot, of which the run has no rows"):
                self.refuse(world, text, begin)

    def test_a_loop_of_the_users_own_has_no_order(self, world: World) -> None:
        world.watch._data = None
        self.refuse(world, self.DEFERS.format(6))
        world.watch._data = []
        self.refuse(world, AFTER)
        with pytest.raises(CosmatiError, match="defers warm, and a step's rows are regrouped as they come"):
            self.refuse(world, self.DEFERS.format(6))

    def test_packs_are_told_apart_nowhere_else_than_before(self, tmp_path: Path) -> None:
        world = World(tmp_path, HALF)
        apart = "{class: cold, region: head, weight: 0.5}\n"
        one = 'rules:\n  - {class: "**", weight: 1}\n  - ' + apart
        self.refuse(world, one)
        plan = replace(world.a.plan, facts=replace(world.a.plan.facts, packed=True))
        world.watch._a = replace(world.a, plan=plan)
        self.refuse(world, HALF.replace("0.5", "0.25"))
        with pytest.raises(PolicyError, match="tells classes apart in head, and none did so before"):
            self.refuse(world, one)
        both = one + "  - {class: cold, region: body, weight: 0.5}\n"
        with pytest.raises(PolicyError, match="tells classes apart in body, head, and"):
            self.refuse(world, both)

    def test_what_was_told_apart_in_an_earlier_phase_may_be_again(self, tmp_path: Path) -> None:
        text = self.PHASES.format(4) + (
            '  - {class: "**", phase: "*", weight: 1}\n  - {class: cold, phase: one, region: head, weight: 0.5}\n'
        )
        world = World(tmp_path, text)
        assert world.a.policy is not None
        assert world.watch._unlike(world.a.policy) == {"head"}
        assert world.watch._unlike(world.a.policy, 3) == {"head"}
        assert world.watch._unlike(world.a.policy, 4) == set()

    def test_a_phase_of_one_step_tells_apart_too(self, tmp_path: Path) -> None:
        text = self.PHASES.format(1) + (
            '  - {class: "**", phase: "*", weight: 1}\n  - {class: cold, phase: one, region: head, weight: 0.5}\n'
        )
        world = World(tmp_path, text)
        assert world.a.policy is not None
        assert world.watch._unlike(world.a.policy) == {"head"}
        assert world.watch._unlike(world.a.policy, 1) == set()

    def test_methods_that_act_by_what_is_denied_are_asked(self, world: World) -> None:
        denies = AFTER.replace("decision: reject", "region: head, weight: 0")
        self.refuse(world, denies)
        acts: Any = SimpleNamespace(facts=world.a.plan.facts, with_hook=lambda hook: {"passing": (Acts(),)}[hook])
        world.watch._a = replace(world.a, plan=acts)
        self.refuse(world, AFTER)
        with pytest.raises(PolicyError, match="denies cold other regions than before, and Acts acts by that"):
            self.refuse(world, denies)

    BANDED = """bands: {{names: [low, high], measure: a score, thresholds: [0.5]}}
phases: [{{name: one, until: 8ba}}, {{name: two}}]
rules:
  - {{class: "**", phase: "*", weight: 1}}
"""

    def test_rows_of_which_no_band_is_said_are_of_the_lowest(self, tmp_path: Path) -> None:
        text = self.BANDED + "  - {{class: warm, phase: one, band: {0}, decision: defer}}\n"
        world = World(tmp_path)
        assert not hasattr(world.watch._data, "kinds")
        self.refuse(world, text.format("high"))
        with pytest.raises(PolicyError, match="defers warm from step 5 on"):
            self.refuse(world, text.format("low"))

    @pytest.mark.parametrize(("band", "told"), [("low", {"head"}), ("high", set())])
    def test_packs_that_say_no_band_are_of_the_lowest(self, tmp_path: Path, band: str, told: set[str]) -> None:
        text = self.BANDED + "  - {{class: cold, region: head, band: {0}, weight: 0.5}}\n"
        world = World(tmp_path, text.format(band))
        assert world.a.policy is not None
        assert world.watch._unlike(world.a.policy) == told

    def test_only_kinds_of_rows_that_the_data_have_are_looked_at(self, tmp_path: Path) -> None:
        text = self.BANDED + "  - {{class: [{1}], phase: one, band: {0}, decision: defer}}\n"
        world = World(tmp_path, text.format("high", "cold"))
        data: Any = world.watch._data

        class OfBands(InMemory):
            """Rows of cold are of both bands, those of hot of the higher one, and there are none of warm."""

            kinds = ((0, 0), (0, 1), (1, 1))

        world.watch._data = OfBands(ROWS, 16, torch.arange(48) % 3, data.class_names)
        for band, name in (("high", "cold"), ("low", "hot"), ("low", "warm"), ("high", "warm")):
            self.refuse(world, text.format(band, name))
        for band, name in (("low", "cold"), ("high", "hot"), ("high", "cold, hot")):
            with pytest.raises(PolicyError, match=f"defers {name.split()[-1]} from step 5 on"):
                self.refuse(world, text.format(band, name))


def test_tokens_of_packs_are_told_apart_by_their_kinds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.a.policy is not None
    asked: list[Any] = []
    monkeypatch.setattr(policy_watch, "token_kinds", lambda one, data: asked.append(data) or (0, 0, 0))  # type: ignore[func-returns-value]
    assert world.watch._unlike(world.a.policy) == {"body"}
    assert asked == [world.watch._data]


class Acts:
    """A method that acts by what a class is denied."""


def hand_made(*weights: tuple[tuple[float, float], ...]) -> Any:
    return replace(HAND_MADE, weight=weights)


def test_methods_are_not_given_other_denials_than_before() -> None:
    one = ((1.0, 1.0), (1.0, 1.0))
    now = hand_made(one, ((0.0, 1.0), (1.0, 1.0)), one)
    plan: Any = SimpleNamespace(with_hook=lambda hook: {"passing": (Acts(), Acts())}[hook])
    none: Any = SimpleNamespace(with_hook=lambda hook: ())
    same = [
        hand_made(one, ((0.0, 0.5), (0.5, 1.0)), one),
        hand_made(one, ((1.0, 1.0), (0.0, 1.0)), one),
        hand_made(one, ((1.0, 0.0), (1.0, 1.0)), one),
        hand_made(one, ((0.0, 0.0), (0.0, 0.0)), one),
    ]
    for new in same:
        policy_watch._refuse_for_methods(plan, now, new, 10)
    other = hand_made(one, ((1.0, 1.0), (1.0, 0.0)), one)
    policy_watch._refuse_for_methods(none, now, other, 10)
    with pytest.raises(PolicyError, match="denies bound other regions than before, and Acts, Acts acts by that"):
        policy_watch._refuse_for_methods(plan, now, other, 10)
    with pytest.raises(PolicyError, match="denies bound"):
        policy_watch._refuse_for_methods(plan, now, same[2], 9)
    with pytest.raises(PolicyError, match="denies free"):
        policy_watch._refuse_for_methods(plan, now, hand_made(((1.0, 1.0), (0.0, 1.0)), one, one), 19)


def test_nothing_is_denied_by_a_weight_that_is_not_zero() -> None:
    assert policy_watch._denied((0.0, 0.5, 1.0)) == (True, False, False)
