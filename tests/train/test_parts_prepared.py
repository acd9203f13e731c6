"""Each part of a run's setup takes what fits, says of the rest why it doesn't, and hands on what the step reads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Clock
from cosmati.core.loss import Classification
from cosmati.core.method import Method, Stage
from cosmati.core.rng import DefaultGenerators
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.optim import SGD, Cosine, Muon
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train import prepare as module
from cosmati.train.config import RunConfig
from cosmati.train.feed import IterableFeed, OrderedFeed
from cosmati.train.ingredients import Ingredients
from cosmati.train.prepare import Prepared, prepare
from cosmati.train.ranks import Ranks

TAXONOMY = Taxonomy("t", "1", (("cold", ""), ("hot", ""), ("warm", "")))
HEAD = 'version: 1\ntaxonomy: t\nregions: {body: {params: ["0.*"]}, head: {params: ["1.*"]}}\n'
FREE = HEAD + 'rules:\n  - {class: "**", weight: 1}\n  - {class: hot, region: body, weight: 0}\n'
LATE = HEAD + (
    "phases: [{name: one, until: 3ba}, {name: two}]\n"
    'rules:\n  - {class: "**", phase: "*", weight: 1}\n  - {class: warm, phase: one, decision: defer}\n'
)
ROWS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2


def source(rows_per_step: int = 12, names: tuple[str, ...] = ("warm", "cold", "hot")) -> InMemory:
    return InMemory(ROWS, rows_per_step, torch.arange(24) % 3, names)


def prepared(data: Any = None, policy: str | None = FREE, **given: Any) -> Prepared:
    config = {"budget": "6ba", "num_microbatches": 4, "num_threads": 1} | given.pop("config", {})
    ingredients = Ingredients(
        given.pop("model", None) or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        given.pop("loss", None) or Classification(2),
        data,
        given.pop("optimizers", [SGD(lr=0.1)]),
        given.pop("methods", ()),
        None if policy is None else load_policy(policy),
        None if policy is None else TAXONOMY,
        RunConfig(**config),
    )
    assert not given
    return prepare(ingredients)


class Ordered:
    """An order of rows of one class, or of several at once, or of packs."""

    def __init__(self, kind: str, num: int) -> None:
        self.kind, self.num = kind, num

    def class_id(self, step: int, index: int) -> int | None:
        assert (step, index) == (0, 0)
        return 1 if self.kind == "pure" else None

    def microbatch(self, step: int, index: int) -> Batch:
        assert (step, index) == (0, 0)
        tokens = torch.zeros(2, 3, dtype=torch.int64) if self.kind == "packs" else None
        ids = torch.arange(2)
        return Batch(torch.zeros(2, 3, dtype=torch.int64), Lineage(ids, ids * 0, token_class_ids=tokens))


def order(
    kind: str, *fails: int, is_governed: bool = True, num: int = 4, alone: str = ""
) -> tuple[list[int], Ordered, bool]:
    asked: list[int] = []

    def given_by(*, num_microbatches: int) -> Any:
        asked.append(num_microbatches)
        if num_microbatches in fails:
            raise ValueError(f"V = {num_microbatches}")
        return Ordered(alone or kind if num_microbatches == 1 else kind, num_microbatches)

    found: Any
    found, is_whole = module._order(given_by, num, is_governed=is_governed)
    return asked, found, is_whole


def test_rows_of_several_classes_are_taken_whole_under_a_policy() -> None:
    for kind, is_governed in (("pure", True), ("packs", True), ("mixed", False), ("pure", False)):
        asked, found, is_whole = order(kind, is_governed=is_governed)
        assert (asked, found.num, is_whole) == ([4], 4, False)
    asked, found, is_whole = order("mixed")
    assert (asked, found.num, is_whole) == ([4, 1], 1, True)


def test_what_cannot_be_cut_so_is_taken_whole_where_it_is_regrouped_anyway() -> None:
    asked, found, is_whole = order("mixed", 4)
    assert (asked, found.num, is_whole) == ([4, 1], 1, True)
    for kind, fails, is_governed in (
        ("mixed", [4], False),
        ("pure", [4], True),
        ("packs", [4], True),
        ("mixed", [4, 1], True),
    ):
        with pytest.raises(ValueError, match="V = 4"):
            order(kind, *fails, is_governed=is_governed)


def test_an_order_is_asked_for_whom_the_policy_ever_admits() -> None:
    never = FREE + "  - {class: cold, decision: reject}\n"
    ready = prepared(source(), never)
    assert isinstance(ready.feed, OrderedFeed)
    classes = {one for step in range(6) for one in ready.feed.class_ids(Clock(step=step))}
    assert classes == {0, 2}
    assert list(ready.class_map) == [2, 0, 1]
    routes = [ready.assembly.router.route_of(class_id, 0).class_id for class_id in range(3)]
    assert routes == [2, 0, 1]
    assert ready.assembly.router.class_names == ("warm", "cold", "hot")


def test_without_a_source_classes_are_the_policys() -> None:
    batch = Batch((ROWS[0][:12], ROWS[1][:12]), Lineage(torch.arange(12), torch.arange(12) % 3))
    ready = prepared([batch])
    assert isinstance(ready.feed, IterableFeed)
    assert ready.assembly.router.class_names == ("cold", "hot", "warm")
    facts = ready.assembly.plan.facts
    assert (facts.regroups, facts.packed, facts.own_loop, facts.positional_data) == (True, False, False, True)
    assert facts.rows_per_microbatch is None
    with pytest.raises(PlanError, match="A policy needs rows with classes"):
        prepared([ROWS])
    feed = prepared(iter([ROWS]), None).feed
    assert isinstance(feed, IterableFeed)
    assert isinstance(feed._ranks, Ranks)
    assert isinstance(feed._generators, DefaultGenerators)
    plain = prepared([ROWS], None).assembly
    assert plain.router.class_names == ()
    assert not plain.plan.facts.regroups
    assert not plain.budget.knows_rows


def test_facts_of_a_source_and_of_a_loop_of_ones_own() -> None:
    facts = prepared(source()).assembly.plan.facts
    assert (facts.regroups, facts.packed, facts.own_loop, facts.rows_per_microbatch) == (False, False, False, 3)
    assert facts.denied == (("hot", "body"),)
    assert (facts.host_clock, facts.owned, facts.never_offered) == (False, {}, ())
    assert not prepared(None).assembly.budget.knows_rows
    own = prepared(None).assembly.plan.facts
    assert (own.regroups, own.own_loop, own.positional_data, own.rows_per_microbatch) == (False, True, True, None)


def test_statistics_that_are_rounded_matter_where_there_are_several_microbatches() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    data = (ROWS[0].double(), ROWS[1])
    for num in (2, 4):
        several = prepared(InMemory(data, 12), None, model=model(), config={"num_microbatches": num})
        assert several.assembly.plan.facts.rounded_statistics == ("1",)
    one = prepared(InMemory(data, 12), None, model=model(), config={"num_microbatches": 1}).assembly.plan.facts
    assert (one.rounded_statistics, one.row_coupled_layers) == ((), ("1",))


def test_deferred_rows_come_again_in_the_order_and_what_finds_no_room_is_told() -> None:
    ready = prepared(source(), LATE)
    assert isinstance(ready.feed, OrderedFeed)
    ids = [ready.feed.class_ids(Clock(step=step)) for step in range(6)]
    assert all(0 not in early for early in ids[:3])
    assert any(0 in later for later in ids[3:])
    plain = prepared(source()).feed
    assert isinstance(plain, OrderedFeed)
    assert 0 in plain.class_ids(Clock())
    short = prepared(source(), LATE.replace("3ba", "5ba"))
    (told,) = short.assembly.plan.facts.never_offered
    assert told.startswith("warm, ")
    assert told.endswith(" microbatches")


def test_rows_that_cannot_wait_are_refused_or_told() -> None:
    batch = Batch((ROWS[0][:12], ROWS[1][:12]), Lineage(torch.arange(12), torch.arange(12) % 3))
    with pytest.raises(PlanError, match="defers warm, and a step's rows are regrouped as they come"):
        prepared([batch], LATE)
    with pytest.warns(UserWarning, match="defers warm in one"):
        ready = prepared(None, LATE)
    assert ready.assembly.plan.facts.never_offered == ("rows of warm in one that your loop doesn't give again later",)
    warm = Batch(ROWS[0][:2], Lineage(torch.arange(2), torch.full((2,), 2)), class_id=2)
    a = ready.assembly
    a.deferred_rows.see([warm], [2], 0, a.router)
    assert a.deferred_rows.num_waiting == {"warm": 2}, "and no second warning"
    a = prepared(source(names=("cold", "hot", "warm")), LATE).assembly
    with pytest.warns(UserWarning, match="warm"):
        a.deferred_rows.see([warm], [2], 0, a.router)


@pytest.mark.parametrize("num", [1, 2, 6])
def test_what_has_no_shape_yet_is_named(num: int) -> None:
    layers = [nn.LazyLinear(2, bias=False) for _ in range(num)]
    names = ", ".join(f"{i}.weight" for i in range(min(num, 5)))
    with pytest.raises(PlanError, match=rf"^{names} {'has' if num == 1 else 'have'} no shape yet"):
        prepared(source(), None, model=nn.Sequential(*layers))
    with pytest.raises(PlanError, match="running_mean"):
        prepared(source(), None, model=nn.Sequential(nn.LazyBatchNorm1d(affine=False)))


@pytest.mark.parametrize(("shapes", "is_refused"), [((8,), False), ((9,), True), ((3, 3), True), ((2, 4), False)])
def test_shapes_multiply_up_to_what_may_be_recompiled(shapes: tuple[int, ...], is_refused: bool) -> None:
    plan: Any = SimpleNamespace(methods=[SimpleNamespace(shapes=lambda budget, own=own: own) for own in shapes])
    compiles: Any = SimpleNamespace(compile_blocks=True)
    budget: Any = None
    module._check_shapes(plan, budget, SimpleNamespace(compile_blocks=False), 99)  # type: ignore[arg-type]
    if is_refused:
        with pytest.raises(PlanError, match=r"up to 9 input shapes, and compiled blocks may be recompiled 8 times"):
            module._check_shapes(plan, budget, compiles, 1)
    else:
        module._check_shapes(plan, budget, compiles, 1)
        with pytest.raises(PlanError, match=r"up to 16 input shapes"):
            module._check_shapes(plan, budget, compiles, 2)


def test_optimizers_hold_parameters_by_index_with_their_rates_and_schedules() -> None:
    schedule = Cosine()
    optimizers = [SGD(lr=0.2, parameters="1.*", schedule=schedule), SGD(lr=0.1)]
    one, two = prepared(source(), None, optimizers=optimizers).assembly.optimizers
    assert (one.parameters, one.base_rates, one.schedule, one.method) == ({2, 3}, (0.2,), schedule, None)
    assert (two.parameters, two.base_rates) == ({0, 1}, (0.1,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    built = torch.optim.SGD([{"params": model[1].parameters(), "lr": 0.3}, {"params": model[0].weight}], lr=0.4)
    (own,) = prepared(source(), None, model=model, optimizers=[built]).assembly.optimizers
    assert (own.optimizer, own.parameters, own.base_rates, own.schedule) == (built, {0, 2, 3}, (0.3, 0.4), None)


@dataclass(frozen=True, kw_only=True)
class Rates(Method):
    """Changes learning rates."""

    stage: ClassVar[Stage] = Stage.AVERAGE
    claims: ClassVar[frozenset[str]] = frozenset({"learning rate"})

    def learning_rate(self, rate: Any, elapsed: float, budget: Any) -> float:
        return 0.5 * float(rate(elapsed))


class Unclaimed(Rates):
    """Has the hook, and leaves rates alone."""

    claims: ClassVar[frozenset[str]] = frozenset()


def test_the_method_that_changes_rates_is_the_one_that_claims_to() -> None:
    method = Rates()
    (own,) = prepared(source(), None, methods=[Unclaimed(), method]).assembly.optimizers
    assert own.method is method
    (own,) = prepared(source(), None, methods=[Unclaimed()]).assembly.optimizers
    assert own.method is None
    model = nn.Linear(3, 2)
    built = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"Rates\(\) changes the learning rate, and a built torch optimizer leaves it"):
        prepared(source(), None, model=model, optimizers=[built], methods=[method])


def test_only_optimizers_of_whole_matrices_share_their_work() -> None:
    muon = Muon(lr=0.1, parameters="*.weight")
    one, two = prepared(source(), None, optimizers=[muon, SGD(lr=0.1)]).assembly.optimizers
    assert (one.optimizer.sharing.rank, one.optimizer.sharing.world) == (0, 1)  # type: ignore[attr-defined]
    assert not hasattr(two.optimizer, "sharing")


def test_what_was_prepared_is_at_hand() -> None:
    data = source()
    ready = prepared(data)
    a = ready.assembly
    assert ready.data_digest == data.digest
    assert (ready.vouched, ready.watch, ready.given.data, tuple(ready.artifacts)) == (None, None, data, ())
    assert (a.num_microbatches, a.ranks.run, len(a.turns), a.regions.names) == (4, 4, 1, ("body", "head"))
    assert (a.budget.steps_per_epoch, a.budget.rows_per_step, a.budget.tokens_per_row) == (1, 12, 1)
    assert a.policy is not None
    assert a.policy.policy_digest == load_policy(FREE).digest
    assert ready.identity["policy"] == load_policy(FREE).digest.hex()
    assert (a.device, a.image_size, a.deferred_rows.num_waiting) == (torch.device("cpu"), None, {})
    assert prepared(None, None).assembly.regions.names == ("all",)


def test_what_each_part_asks_for_is_given_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, tuple[Any, ...]] = {}

    def spy(name: str) -> None:
        own = getattr(module, name)

        def noting(*given: Any) -> Any:
            asked[name] = given
            return own(*given)

        monkeypatch.setattr(module, name, noting)

    for name in (
        "compute_whole",
        "refuse_unsavable",
        "find_couplings",
        "sharded_as_asked",
        "refuse_times",
        "compile_given",
    ):
        spy(name)
    ready = prepared(source())
    a, given = ready.assembly, ready.given
    assert (asked["compute_whole"], asked["refuse_unsavable"]) == ((given.model,), (a.model, given.loss))
    assert asked["find_couplings"][0] is given
    assert list(asked["find_couplings"][1]) == list(a.optimizers)
    assert asked["find_couplings"][3:] == (a.model, a.budget)
    assert asked["sharded_as_asked"][:4] == (given, a.model, a.regions, a.ranks)
    assert asked["sharded_as_asked"][4] == a.plan
    assert asked["refuse_times"][:4] == (given.config, a.budget, given.data, given.methods)
    assert asked["compile_given"] == (given, a.regions, a.budget)
