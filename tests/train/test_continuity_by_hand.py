"""A checkpoint's facts tell a later resume what the run is, and the resume refuses, withdraws or takes up just that."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import RunConfig
from cosmati.core.plan import Facts, Promise, make_plan
from cosmati.core.rng import DefaultGenerators
from cosmati.errors import ChangedRunError, CheckpointError, PlanError
from cosmati.train.continuity import CHECKPOINT_VERSION, Continuity, _decimal
from cosmati.train.identity import SURROUNDINGS, Change
from tests.train.hand_made import POLICY

CPU = torch.device("cpu")
PLAN = make_plan([], Facts(num_microbatches=4, rows_per_microbatch=1, positional_data=True, has_ledger=True))
FOUR = {Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE, Promise.PARITY}
AROUND = {name: f"{name} of before" for name in SURROUNDINGS}
IDENTITY = {"seed": 1, "cadence.check_every": 2, "parent.run": "first", "budget.span": "4ba"}
ROWS = torch.zeros(4, 2)


class Told:
    """Ranks of which all but the first say what a test has them say."""

    def __init__(self, *others: dict[str, Any], has_met: bool = False) -> None:
        self.others, self.is_parallel, self.has_met = others, bool(others), has_met

    def told_by_all(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        return [told, *({**told, **{k: v for k, v in one.items() if k in told}} for one in self.others)]


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1, bias=False), nn.Dropout(0.5))
        nn.init.ones_(self[0].weight)  # type: ignore[arg-type]
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


class Scaled(nn.Module):
    """A loss with a buffer and a mode of its own."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("limit", torch.tensor(torch.inf))

    def forward(self, model: Any, data: Tensor) -> Tensor:
        return model(data).sum() * self.scale


def nothing(model: Any, data: Any) -> Tensor:
    raise ValueError


@dataclass(frozen=True)
class Made:
    """What is asked of an assembly."""

    model: Any = field(default_factory=Model)
    losses: tuple[Any, ...] = field(default_factory=lambda: (Scaled(),))
    ranks: Any = field(default_factory=Told)
    policy: Any = None
    config: RunConfig = field(default_factory=lambda: RunConfig(budget="4ba", run_folder="/runs/x"))  # type: ignore[arg-type]
    device: torch.device = CPU
    generators: Any = field(default_factory=lambda: DefaultGenerators(CPU))
    run_folder: Any = None

    @property
    def turns(self) -> list[Any]:
        return [SimpleNamespace(loss=loss) for loss in self.losses]

    @property
    def layout(self) -> Any:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return SimpleNamespace(held=lambda: {n: SimpleNamespace(tensor=t) for n, t in tensors.items()})


def begun(
    made: Made | None = None,
    identity: Any = IDENTITY,
    environment: Any = AROUND,
    root: bytes = b"R",
    policy: Any = None,
) -> Continuity:
    return Continuity(made or Made(), identity, environment, root, policy)  # type: ignore[arg-type]


def facts_of(continuity: Continuity, step: int = 3, *, compare_code: bool = True, keep_modes: bool = True) -> Any:
    return continuity.facts(step, PLAN, compare_code=compare_code, keep_modes=keep_modes)


def checkpoint(step: int = 3, **facts: Any) -> Any:
    kept = begun()
    kept.see(ROWS)
    return SimpleNamespace(step=step, facts={**facts_of(kept, step), **facts})


def test_what_begins_infinite_is_known_by_name_of_all_ranks() -> None:
    made = Made(ranks=Told({"names": ["elsewhere"]}))
    names = begun(made).never_finite
    assert {"mask", "elsewhere"} <= names
    assert any("limit" in name for name in names)
    assert "0.weight" not in names


def test_a_run_that_has_just_begun_has_nothing_to_tell() -> None:
    one = begun()
    assert (one.changed, one.policy_changes, one.has_seen, one.anchor) == ([], [], False, None)
    assert (one.budget_was_read, one.budget_use_is_told, one.initial_root) == (False, True, b"R")
    assert facts_of(one) == {
        "version": CHECKPOINT_VERSION,
        "identity": IDENTITY,
        "files": {},
        "environment": AROUND,
        "initial_root": "52",
        "phases": [],
        "past_policies": [],
        "broken_pairs": [],
        "budget_was_read": False,
        "budget_use_is_told": True,
        "modes": {},
        "probe": {"specs": None, "losses": None},
    }


def test_surroundings_are_all_told_and_nothing_beside_them() -> None:
    told = facts_of(begun(environment={"torch": "2", "python": "3"}))["environment"]
    assert told == {**dict.fromkeys(SURROUNDINGS, ""), "torch": "2"}


def test_a_policy_that_was_signed_and_changes_without_a_stop_are_told() -> None:
    one = begun()
    one.anchor, one.policy_changes = {"text": {}, "root": "r", "number": 1}, [{"step": 2}]
    told = facts_of(one)
    assert (told["signed_policy"], told["policy_changes"]) == (one.anchor, [{"step": 2}])
    assert told["policy_changes"] is not one.policy_changes


def test_a_policy_signed_for_another_run_is_refused() -> None:
    vouched = SimpleNamespace(statement={"run": "z"}, voucher=SimpleNamespace(target="t", root="r"), number=1)
    policy = SimpleNamespace(vouched=vouched, to_mapping=dict)
    made = Made(config=RunConfig(budget="4ba"))
    with pytest.raises(CheckpointError, match="t was signed as a change of the run z"):
        begun(made, policy=policy)


def test_modes_that_are_not_the_recipes_own_are_told_and_put_back() -> None:
    made = Made()
    made.model[1].eval()
    one = begun(made)
    made.model[0].eval()
    made.model[1].train()
    made.losses[0].eval()
    told = facts_of(one)["modes"]
    assert told == {"0/0": False, "0/1": True, "1/": False}
    assert facts_of(one, keep_modes=False)["modes"] is None
    other = Made()
    other.model[1].eval()
    plan = begun(other).resume(checkpoint(modes=told), PLAN)
    assert [other.model.training, other.model[0].training, other.model[1].training] == [True, False, True]
    assert other.losses[0].training is False
    assert plan == PLAN
    added = begun(other)
    other.model.append(nn.Linear(1, 1))
    assert facts_of(added)["modes"] == {}
    other.model[2].eval()
    assert facts_of(added)["modes"] == {"0/2": False}


def test_where_nobody_knows_the_modes_promises_are_withdrawn() -> None:
    made = Made()
    made.model[1].eval()
    plan = begun(made).resume(checkpoint(modes=None), PLAN)
    assert made.model[1].training is False
    assert {one for one in FOUR if not plan.holds(one)} == {Promise.RESUME, Promise.REPLAYABLE}
    (why,) = {g.because for g in plan.guarantees if not g.holds and g.promise is Promise.RESUME}
    assert why.startswith("The checkpoint of step 3 in /runs/x was saved in another mode than its last step's")
    assert begun().resume(checkpoint(modes=None), plan) == plan


@pytest.mark.parametrize(("version", "said"), [(3, "version 3"), (None, "version 1"), (5, "version 5")])
def test_a_checkpoint_of_another_version_is_refused(version: int | None, said: str) -> None:
    old = checkpoint(version=version)
    if version is None:
        del old.facts["version"]
    with pytest.raises(CheckpointError) as caught:
        begun().resume(old, PLAN)
    assert str(caught.value).startswith(
        f"The checkpoint of step 3 in /runs/x has {said}, and this release resumes version {CHECKPOINT_VERSION}."
    )


def test_a_resume_takes_up_what_the_checkpoint_tells() -> None:
    one = begun(identity={**IDENTITY, "cadence.check_every": 5, "parent.asked": "first"}, root=b"other")
    plan = one.resume(checkpoint(budget_was_read=True, budget_use_is_told=True), PLAN)
    assert plan == PLAN
    assert one.changed == [Change("cadence.check_every", 2, 5)]
    assert (one.initial_root, one.budget_was_read, one.budget_use_is_told) == (b"R", True, True)
    told = facts_of(one, 5)
    assert told["identity"] == {**IDENTITY, "cadence.check_every": 5}
    assert told["probe"]["specs"] == [([4, 2], "float32", 1)]


@pytest.mark.parametrize("was_read", [True, False])
def test_of_an_earlier_release_nobody_knows_what_the_budget_was_taken_for(was_read: bool) -> None:
    old, one = checkpoint(budget_was_read=was_read), begun()
    del old.facts["budget_use_is_told"]
    one.resume(old, PLAN)
    assert (one.budget_was_read, one.budget_use_is_told) == (was_read, not was_read)


def test_another_run_is_refused_by_name() -> None:
    with pytest.raises(ChangedRunError, match=r"^The checkpoint of step 3 in /runs/x is of another run: seed 2, was 1"):
        begun(identity={**IDENTITY, "seed": 2}).resume(checkpoint(), PLAN)


def test_files_are_compared_with_the_facts_that_they_stand_for() -> None:
    named = {**IDENTITY, "loss.is": "file_port.loss"}
    old = checkpoint(identity=named, files={"files.file_port": "here.port"})
    assert begun(identity={**IDENTITY, "loss.is": "port.loss"}).resume(old, PLAN) == PLAN


def test_other_surroundings_withdraw_what_rests_on_them_and_compare_no_code() -> None:
    made = Made(losses=(Scaled(2.0),))
    one = begun(made, {**IDENTITY, "model.contents.0.table": "b"}, {**AROUND, "torch": "3"})
    old = checkpoint(identity={**IDENTITY, "model.contents.0.table": "a"})
    plan = one.resume(old, PLAN)
    assert one.changed == [Change("torch", "torch of before", "3")]
    gone = [g for g in plan.guarantees if not g.holds and g.promise in FOUR]
    assert {g.promise for g in gone} == {one for one in FOUR if PLAN.holds(one)}
    assert {g.because for g in gone} == {"resumed with torch 3, was torch of before"}
    one.see(ROWS)
    with pytest.raises(ChangedRunError, match="table b, was a"):
        begun(identity={**IDENTITY, "model.contents.0.table": "b"}).resume(old, PLAN)


def test_code_that_computes_another_loss_is_refused_once() -> None:
    one = begun(Made(losses=(Scaled(2.0),)))
    one.resume(checkpoint(), PLAN)
    with pytest.raises(ChangedRunError) as caught:
        one.see(ROWS)
    was = float.fromhex(checkpoint().facts["probe"]["losses"][0])
    assert str(caught.value).startswith(
        "The checkpoint of step 3 in /runs/x is of another run: from the same weights, a fixed microbatch has the loss "
        f"{2 * was!r}, and had {was!r}. The code of the model or of the loss has changed"
    )
    assert one.has_seen
    one.see(ROWS)


@pytest.mark.parametrize("losses", [None, [None], ["0x1p+3"]])
def test_what_could_not_be_computed_is_not_compared(losses: Any) -> None:
    kept = checkpoint(probe={"specs": None, "losses": losses})
    one = begun(Made(losses=(nothing,) if losses == ["0x1p+3"] else (Scaled(2.0),)))
    one.resume(kept, PLAN)
    one.see(ROWS)
    assert one.has_seen
    same = begun()
    same.resume(checkpoint(), PLAN)
    same.see(ROWS)


def test_beside_a_loss_that_could_not_be_computed_another_one_is_compared() -> None:
    def told(*losses: Any) -> Any:
        one = begun(Made(losses=losses))
        one.see(ROWS)
        return facts_of(one)["probe"]

    was, now = Scaled(), Scaled(2.0)
    (alone,) = told(was)["losses"]
    kept = checkpoint(probe=told(nothing, was, was))
    assert kept.facts["probe"]["losses"] == [None, alone, alone]
    for losses in [(nothing, was, was), (was, was, was), (now, nothing, was), (was, was, nothing)]:
        same = begun(Made(losses=losses))
        same.resume(kept, PLAN)
        same.see(ROWS)
    other = begun(Made(losses=(nothing, was, now)))
    other.resume(kept, PLAN)
    value = float.fromhex(alone)
    with pytest.raises(
        ChangedRunError, match=re.escape(f"the loss {value!r}, {2 * value!r}, and had {value!r}, {value!r}")
    ):
        other.see(ROWS)


def test_code_is_compared_where_a_checkpoint_may() -> None:
    one = begun()
    one.see(ROWS)
    assert facts_of(one, compare_code=False)["probe"] == {"specs": [([4, 2], "float32", 1)], "losses": None}
    assert len(facts_of(one)["probe"]["losses"]) == 1


def test_losses_are_computed_in_the_runs_precision() -> None:
    def kind(model: Any, data: Tensor) -> Tensor:
        return torch.tensor(float(model(data).dtype == torch.bfloat16))

    for precision, found in (("float32", 0.0), ("bfloat16", 1.0)):
        one = begun(Made(losses=(kind,), config=RunConfig(budget="4ba", precision=precision)))  # type: ignore[arg-type]
        one.see(ROWS)
        assert facts_of(one)["probe"]["losses"] == [found.hex()]


def test_what_policies_have_allowed_is_told_by_spans() -> None:
    one = begun(Made(policy=POLICY))
    assert one.policy_in_force is POLICY
    assert facts_of(one, 5)["phases"] == [["first", 0, 10], ["second", 10, 20]]
    assert [(span["first"], span["end"]) for span in facts_of(one, 5)["past_policies"]] == [(0, 5)]
    assert one.close_span(4, PLAN) == POLICY.policy_digest
    other = dataclasses.replace(POLICY, weight=(((0.0, 0.0),) * 2,) * 3, policy_digest=b"Q" * 32)
    anchor = {"text": {}, "root": "r", "number": 2}
    one.go_by(SimpleNamespace(vouched=None), other, anchor)  # type: ignore[arg-type]
    assert (one.policy_in_force, one.anchor) == (other, anchor)
    assert one.close_span(9, PLAN) == b"Q" * 32
    told = facts_of(one, 12)
    assert [(span["first"], span["end"]) for span in told["past_policies"]] == [(0, 4), (4, 12)]
    again = begun(Made(policy=other))
    again.resume(checkpoint(12, past_policies=told["past_policies"], broken_pairs=[]), PLAN)
    assert [(s["first"], s["end"]) for s in facts_of(again, 15)["past_policies"]] == [(0, 4), (4, 15)]


def test_broken_promises_of_an_earlier_policy_stay_broken() -> None:
    pairs = (("bound", "body"), ("late", "body"))
    denied = Facts(num_microbatches=4, rows_per_microbatch=1, positional_data=True, has_ledger=True, denied=pairs)
    plan = make_plan([], denied)
    taught = [{"first": 0, "end": 2, "regions": {"x": ["0.weight"]}, "taught": {"late": ["x"]}}]
    wrote = {"promise": str(Promise.NO_DIRECT_WRITE), "class": "bound", "because": "it wrote"}
    broken = [{**wrote, "parameters": ["0.weight"]}]
    one = begun(Made(policy=POLICY))
    found = one.resume(checkpoint(past_policies=taught, broken_pairs=broken), plan)
    why = {g.pair: g.because for g in found.guarantees if g.promise is Promise.NO_DIRECT_WRITE and not g.holds}
    assert why[("bound", "body")] == "it wrote"
    assert why[("late", "body")] == "an earlier policy let rows of late teach 'x' in steps 0 to 1"
    assert one.facts(3, found, compare_code=False, keep_modes=True)["broken_pairs"] == broken
    later = one.facts(4, found, compare_code=False, keep_modes=True)["broken_pairs"]
    assert {(b["class"], b["because"]) for b in later} == {("bound", "it wrote"), ("late", why[("late", "body")])}
    old = checkpoint()
    del old.facts["broken_pairs"]
    assert begun(Made(policy=POLICY)).resume(old, plan) == plan


def of_ranks(*others: dict[str, Any], has_met: bool = False, **made: Any) -> Continuity:
    return begun(Made(ranks=Told(*others, has_met=has_met), **made), {**IDENTITY, "model.contents.0.table": "a"})


def test_ranks_that_compute_unlike_losses_are_refused() -> None:
    of_ranks({}, {}).see(ROWS)
    one = begun()
    one.see(ROWS)
    own = facts_of(one)["probe"]["losses"][0]
    with pytest.raises(PlanError) as caught:
        of_ranks({}, {"losses": ["0x1p+3"]}).see(ROWS)
    assert str(caught.value).startswith(
        f"A fixed microbatch has the loss {float.fromhex(own)!r} on rank 0, and 8.0 on rank 2, from the same weights:"
    )


def test_ranks_are_compared_by_the_losses_that_all_could_compute() -> None:
    of_ranks({"losses": [None, "0x1p+3"]}, {"losses": ["0x1p+1", "0x1p+3"]}, losses=(Scaled(), nothing)).see(ROWS)
    one = begun()
    one.see(ROWS)
    (own,) = facts_of(one)["probe"]["losses"]
    with pytest.raises(PlanError, match=r"on rank 0, and 8\.0 on rank 2"):
        of_ranks({"losses": [None, own]}, {"losses": ["0x1p+1", "0x1p+3"]}, losses=(nothing, Scaled())).see(ROWS)


@pytest.mark.parametrize("other", [{"meets": True}, {"around": []}, {"losses": None}, {"losses": [None]}])
def test_ranks_are_not_compared_where_something_is_known_in_which_they_differ(other: dict[str, Any]) -> None:
    of_ranks({"losses": ["0x1p+3"], **other}).see(ROWS)
    of_ranks({"losses": ["0x1p+3"]}, other).see(ROWS)


def test_ranks_are_told_in_what_they_may_differ() -> None:
    heard: list[dict[str, Any]] = []

    class Hearing(Told):
        def told_by_all(self, told: dict[str, Any]) -> list[dict[str, Any]]:
            heard.append(told)
            return super().told_by_all(told)

    identity = {**IDENTITY, "model.contents.0.table": "a"}
    begun(Made(ranks=Hearing({})), identity).see(ROWS)
    (told,) = [one for one in heard if "around" in one]
    surroundings, contents = told["around"]
    assert contents == {"model.contents.0.table": "a"}
    assert surroundings["torch"] == "torch of before"
    assert told["meets"] is False


def test_the_first_ranks_form_counts_for_all() -> None:
    first = [([4, 2], "int64", 9)]

    class Second(Told):
        def told_by_all(self, told: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"specs": first}, told] if "specs" in told else super().told_by_all(told)

    def whole(model: Any, data: Tensor) -> Tensor:
        return data.sum()

    one = begun(Made(ranks=Second({}), losses=(whole,)))
    one.see(torch.zeros(4, 2, dtype=torch.int64))
    assert facts_of(one)["probe"]["specs"] == first


def test_ranks_that_have_drawn_numbers_for_themselves_may_differ() -> None:
    class Drawn(Told):
        def told_by_all(self, told: dict[str, Any]) -> list[dict[str, Any]]:
            if any("scale" in name for name in told):
                return [told, {name: "other" if "scale" in name else value for name, value in told.items()}]
            return super().told_by_all(told)

    begun(Made(ranks=Drawn({"losses": ["0x1p+3"]}))).see(ROWS)


@pytest.mark.parametrize(("value", "said"), [("nan", "nan"), ("-inf", "-inf"), ("0x1p-1", "0.5")])
def test_losses_are_told_in_decimals(value: str, said: str) -> None:
    assert _decimal(value) == said
    assert _decimal("inf") == "inf"
