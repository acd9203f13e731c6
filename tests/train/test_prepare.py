"""From what the user gave to what a step works with: plan, digest, budget, routes and optimizers, each checked."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Budget
from cosmati.core.loss import Classification, LanguageModel, Regression
from cosmati.core.method import Method, Stage
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError, PolicyError
from cosmati.methods import SWA, ScaleSchedule
from cosmati.optim import SGD, AdamW, Cosine, Muon
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.assembly import SubStep
from cosmati.train.compiled_blocks import compile_blocks, is_compiled
from cosmati.train.config import RunConfig
from cosmati.train.held import places_in
from cosmati.train.isolation import denied_pairs
from cosmati.train.prepare import Ingredients, Prepared, prepare
from cosmati.train.signed import wants_ledger
from cosmati.train.trainer import Trainer
from tests.routing.samples import CLASSES, PHASES, compiled
from tests.train.hand_made import SecondOfTwo

TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in ("open", "doubtful", "later", "never", "unused")))
POLICY = load_policy("""
version: 1
taxonomy: t
regions:
  body: {params: ["0.*"]}
  head: {params: ["1.*"]}
phases:
  - {name: first, until: 1ep}
  - {name: second}
rules:
  - {class: open, weight: 1}
  - {class: unused, weight: 1}
  - {class: doubtful, region: body, weight: 0}
  - {class: doubtful, region: head, weight: 1}
  - {class: later, phase: first, decision: defer}
  - {class: later, phase: second, region: body, weight: 0.5}
  - {class: later, phase: second, region: head, weight: 0}
  - {class: never, decision: reject}
""")
ROWS = (torch.zeros(64, 3), torch.zeros(64, dtype=torch.int64))


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def _prepare(
    data: Any = None, *, loss: Any = None, optimizers: Any = None, methods: Any = (), policy: Any = None, **config: Any
) -> Prepared:
    taxonomy = config.pop("taxonomy", TAXONOMY)
    return prepare(
        Ingredients(
            config.pop("model", None) or _model(),
            loss or Classification(2),
            InMemory(ROWS, 8) if data is None else data,
            optimizers or [SGD(lr=0.1)],
            methods,
            policy,
            taxonomy,
            RunConfig(**config),
        )
    )


def _digest(**options: Any) -> str:
    return _prepare(**options).assembly.plan.digest


# ------------------------------------------------------------------------------------------- what determines the bits


@pytest.mark.parametrize(
    "option",
    [{"name": "another"}, {"run_folder": Path("x")}, {"progress": True}, {"num_checkpoints": 5}, {"max_ranks": 1}],
)
def test_where_a_run_is_kept_and_shown_is_not_in_its_digest(option: dict[str, Any]) -> None:
    assert _digest(**option) == _digest()


def test_what_only_raises_the_number_of_microbatches_counts_by_that() -> None:
    assert _digest(elastic=True) == _digest(max_ranks=8) == _digest(num_microbatches=8) != _digest()


@pytest.mark.parametrize(
    "option",
    [
        {"seed": 1},
        {"budget": "2ep"},
        {"precision": "bfloat16"},
        {"num_threads": 1},
        {"deterministic": False},
        {"num_microbatches": 2},
        {"optimizers": [SGD(lr=0.2)]},
        {"optimizers": [SGD(lr=0.1, schedule=Cosine())]},
        {"data": InMemory(ROWS, 16)},
        {"methods": [ScaleSchedule(ratio=0.5)]},
    ],
)
def test_what_changes_bits_changes_the_digest(option: dict[str, Any]) -> None:
    assert _digest(**option) != _digest()


def test_a_policy_is_in_the_digest() -> None:
    other = load_policy("version: 1\ntaxonomy: t\nrules: [{class: '**', weight: 1}]\n")
    governed = [_digest(policy=policy, data=_classes(), budget="12ba") for policy in (POLICY, other)]
    assert len({_digest(num_microbatches=8, data=_classes(), budget="12ba"), *governed}) == 3


def test_built_optimizers_are_described_by_their_groups_and_not_by_their_weights() -> None:
    def digest(lr: float) -> str:
        model = _model()
        return _digest(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=lr)])

    assert digest(0.1) == digest(0.1) != digest(0.2)


def test_the_plan_knows_the_rest_of_the_run(tmp_path: Path) -> None:
    facts = _prepare(num_microbatches=2, run_folder=tmp_path, ledger=True).assembly.plan.facts
    assert (facts.num_microbatches, facts.rows_per_microbatch, facts.positional_data) == (2, 4, True)
    assert (facts.host_clock, facts.deterministic, facts.has_ledger, facts.num_sub_steps) == (False, True, True, 1)
    assert (facts.input_kind, facts.loss_couples, facts.row_coupled_layers, facts.denied) == ("features", "", (), ())
    assert {name: facts.settings[name] for name in ("num_microbatches", "num_steps", "rows_per_step", "policy")} == {
        "num_microbatches": 2, "num_steps": 8, "rows_per_step": 8, "policy": None
    }  # fmt: skip

    class Coupling(Classification):
        couples = "rows"

    halves = [SubStep("a", Coupling(2), "0.*"), SubStep("b", Classification(2), "1.*")]
    optimizers = [SGD(lr=0.1, parameters="0.*"), SGD(lr=0.1, parameters="1.*")]
    facts = _prepare(
        iter([]), loss=halves, optimizers=optimizers, budget="5sec", deterministic=False
    ).assembly.plan.facts
    assert (facts.rows_per_microbatch, facts.positional_data, facts.input_kind) == (None, False, None)
    assert (facts.host_clock, facts.deterministic, facts.has_ledger, facts.num_sub_steps) == (True, False, False, 2)
    assert facts.loss_couples == "rows"
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert _prepare(model=model).assembly.plan.facts.row_coupled_layers == ("1",)


@pytest.mark.parametrize(
    ("data", "loss", "kind"),
    [
        (InMemory((torch.zeros(8, 1, 3, 3), torch.zeros(8)), 4), None, "images"),
        ([torch.zeros(4, 7, dtype=torch.int64)], None, "tokens"),
        ([(torch.zeros(4, 7), torch.zeros(4))], None, "features"),
        (iter([]), LanguageModel(), "tokens"),
        (iter([torch.zeros(4, 7)]), None, None),
    ],
)
def test_the_kind_of_input_is_that_of_the_first_batch(data: Any, loss: Any, kind: str | None) -> None:
    assert _prepare(data, loss=loss, budget="1ba").assembly.plan.facts.input_kind == kind


def test_data_have_a_digest_or_none() -> None:
    source = InMemory(ROWS, 8)
    assert _prepare(source).data_digest == source.digest != ""
    assert _prepare([ROWS]).data_digest == ""


# --------------------------------------------------------------------------------------------------------- the budget


def test_the_budget_counts_steps_rows_and_tokens() -> None:
    tokens = InMemory(torch.zeros(24, 5, dtype=torch.int64), 4)
    budget = _prepare(tokens, budget="2ep", num_microbatches=2).assembly.budget
    assert (budget.steps_per_epoch, budget.rows_per_step, budget.tokens_per_row, budget.num_steps) == (6, 4, 5, 12)
    budget = _prepare([ROWS] * 3, budget="2ep").assembly.budget
    assert (budget.steps_per_epoch, budget.num_steps) == (3, 6)
    twice = _prepare(methods=[ScaleSchedule(ratio=0.5), ScaleSchedule(ratio=4.0)]).assembly.budget
    assert (twice.ratio, twice.num_steps) == (2.0, 16)
    assert _prepare([ROWS] * 3, budget="2ep", methods=[ScaleSchedule(ratio=0.5)]).assembly.budget.num_steps == 3


def test_a_run_without_data_has_no_feed() -> None:
    given = Ingredients(
        _model(),
        Classification(2),
        None,
        [SGD(lr=0.1)],
        [ScaleSchedule(ratio=2.0)],
        None,
        None,
        RunConfig(budget="3ba"),
    )
    ready = prepare(given)
    assert ready.feed is None
    assert ready.assembly.budget.num_steps == 6
    assert ready.assembly.plan.facts.positional_data


# --------------------------------------------------------------------------------------------------- policy and ledger


def _classes(names: tuple[str, ...] = ("never", "later", "doubtful", "open")) -> InMemory:
    return InMemory(ROWS, 8, class_ids=torch.arange(64) % len(names), class_names=names)


@pytest.mark.parametrize("seed", range(12))
def test_denied_is_what_no_phase_and_kind_of_a_class_may_teach_where_it_is_admitted(seed: int) -> None:
    draw = random.Random(seed)
    rules: list[dict[str, object]] = [{"class": "**", "weight": 1}]
    for name, phase in product(CLASSES, PHASES):
        kind = draw.choice(["head", "head", "tail", "both", "reject"])
        if kind == "reject":
            rules.append({"class": name, "phase": phase, "decision": "reject"})
        elif kind != "both":
            rules.append({"class": name, "region": kind, "phase": phase, "weight": 0})
    policy = compiled(rules)
    expected = []
    for own, region in product(range(len(CLASSES)), range(2)):
        may = [
            policy.weight[own][phase][region] > 0
            for phase in range(2)
            if policy.decision[own][phase] in ("admit", "gate")
        ]
        if may and not any(may):
            expected.append((CLASSES[own], policy.regions[region]))
    assert list(denied_pairs(policy, [3, 0, 1, 2, 1])) == expected
    assert denied_pairs(None, [0]) == ()


def test_classes_are_mapped_by_name_and_denied_pairs_promised() -> None:
    ready = _prepare(_classes(), policy=POLICY, budget="2ep")
    a = ready.assembly
    assert a.num_microbatches == 8
    # 48 of 64 rows are ever admitted, one to a microbatch.
    assert (a.budget.steps_per_epoch, a.budget.num_steps) == (6, 12)
    assert a.plan.facts.denied == (("doubtful", "body"), ("later", "head"))
    assert a.policy is not None
    assert a.policy.phases[1].start_step == 6
    own = [a.router.route_of(class_id, 11).class_id for class_id in range(4)]
    assert [a.policy.classes[index] for index in own] == ["never", "later", "doubtful", "open"]
    assert [a.router.route_of(class_id, 0).offered for class_id in range(4)] == [False, False, True, True]
    assert [a.router.route_of(class_id, 6).offered for class_id in range(4)] == [False, True, True, True]
    assert ready.feed is not None


def test_what_a_policy_needs() -> None:
    with pytest.raises(PlanError, match="give the taxonomy too"):
        _prepare(_classes(), policy=POLICY, taxonomy=None)
    with pytest.raises(PlanError, match=r"classes that the taxonomy lacks: else, other\. It has doubtful, later"):
        _prepare(_classes(("open", "other", "else")), policy=POLICY)
    with pytest.raises(PlanError, match="a run whose number of steps is known; '5sec' has none"):
        _prepare(_classes(), policy=POLICY, budget="5sec")
    with pytest.raises(PlanError, match="A policy needs rows with classes, and list has none"):
        _prepare([ROWS], policy=POLICY)
    with pytest.raises(PolicyError):
        _prepare(_classes(), policy=POLICY, model=nn.Sequential(nn.Linear(3, 2)))


@pytest.mark.parametrize("folder", [None, Path("x")])
@pytest.mark.parametrize("policy", [None, POLICY])
def test_a_governed_run_with_a_folder_keeps_a_ledger_unless_told_otherwise(folder: Any, policy: Any) -> None:
    assert wants_ledger(RunConfig(run_folder=folder), policy) == (folder is not None and policy is not None)
    assert not wants_ledger(RunConfig(run_folder=folder, ledger=False), policy)
    if folder is None:
        with pytest.raises(PlanError, match="needs a run_folder"):
            wants_ledger(RunConfig(run_folder=folder, ledger=True), policy)
    else:
        assert wants_ledger(RunConfig(run_folder=folder, ledger=True), policy)


# ------------------------------------------------------------------------------------------------ surgery, optimizers


@dataclass(frozen=True, kw_only=True)
class Appends(Method):
    """Puts a layer behind the model; may be told which built optimizers there are."""

    label: str
    stage: ClassVar[Stage] = Stage.REPLACE

    def apply(self, model: nn.Module, optimizers: Any = ()) -> nn.Module:
        layer = nn.Linear(2, 2)
        for optimizer in optimizers:
            optimizer.add_param_group({"params": layer.parameters()})
        return nn.Sequential(*model, layer, nn.Identity()) if self.label else nn.Sequential(*model, layer)


@dataclass(frozen=True, kw_only=True)
class Last(Appends):
    """The same, later."""

    stage: ClassVar[Stage] = Stage.CAST


def test_surgery_is_done_in_the_order_of_stages_and_optimizers_follow() -> None:
    model = _model()
    built = torch.optim.SGD(model.parameters(), lr=0.1)
    ready = _prepare([ROWS], model=model, optimizers=[built], methods=[Last(label=""), Appends(label="identity")])
    kinds = [type(layer).__name__ for layer in ready.assembly.model.children()]
    assert kinds == ["Linear", "Linear", "Linear", "Identity", "Linear"]
    (scheduled,) = ready.assembly.optimizers
    assert (scheduled.schedule, scheduled.parameters) == (None, frozenset(range(8)))
    assert scheduled.base_rates == (0.1, 0.1, 0.1)


def test_models_that_share_out_work_by_themselves_are_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    finally:
        torch.distributed.destroy_process_group()
    within = nn.Sequential(nn.Linear(4, 4), nn.DataParallel(nn.Linear(4, 3)))
    for model, name in (
        (wrapped, "The model is wrapped in DistributedDataParallel"),
        (within, "Its 1 is wrapped in Dat"),
    ):
        with pytest.raises(PlanError, match=rf"{name}.*Give the module itself"):
            Trainer(model, Classification(3), optimizers=[SGD(lr=0.1)], config=RunConfig(budget="1ba"))


def test_optimizers_that_do_not_fit_are_refused() -> None:
    model = _model()
    own, foreign = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(nn.Linear(5, 1).parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"SGD has 2 parameter\(s\) that the model lacks .*shapes \[\(1, 5\), \(1,\)\]"):
        _prepare(model=model, optimizers=[own, foreign])
    with pytest.raises(PlanError, match=r"either configurations .* or built torch optimizers, not both"):
        _prepare(model=model, optimizers=[own, SGD(lr=0.1)])
    given = Ingredients(model, Classification(2), None, [], (), None, None, RunConfig(budget="1ba"))
    with pytest.raises(PlanError, match="No optimizer"):
        prepare(given)


def test_a_method_that_changes_rates_needs_schedules() -> None:
    model = _model()
    built = torch.optim.SGD(model.parameters(), lr=0.1)
    follows = SWA(swa_start="0.5dur", schedule_swa_lr=True)
    with pytest.raises(PlanError, match=r"SWA.* changes the learning rate, and a built torch optimizer leaves it"):
        _prepare(model=model, optimizers=[built], methods=[follows])
    (scheduled,) = _prepare(methods=[follows], optimizers=[SGD(lr=0.1, schedule=Cosine())]).assembly.optimizers
    assert scheduled.method is follows
    calm = SWA(swa_start="0.5dur", schedule_swa_lr=False)
    assert _prepare(model=model, optimizers=[built], methods=[calm]).assembly.optimizers[0].method is None


def test_sub_steps_have_their_own_parameters_and_optimizers() -> None:
    halves = [SubStep("a", Regression(), "0.*"), SubStep("b", Regression(), "1.*")]
    one, two = SGD(lr=0.1, parameters="1.*"), AdamW(lr=0.2, parameters="0.*")
    a, b = _prepare(loss=halves, optimizers=[one, two]).assembly.turns
    assert (a.name, dict(a.parameters)) == ("a", {0: "0.weight", 1: "0.bias"})
    assert (b.name, dict(b.parameters)) == ("b", {2: "1.weight", 3: "1.bias"})
    assert (a.optimizers[0].base_rates[0], b.optimizers[0].base_rates[0]) == (0.2, 0.1)
    assert (a.indices, a.learning(frozenset()), a.learning(frozenset({"0.bias", "1.bias"}))) == ({0, 1}, {0, 1}, {0})
    whole = [SubStep("all", Regression()), SubStep("b", Regression(), "1.*")]
    with pytest.raises(PlanError, match="No optimizer's parameters lie within sub-step 'b'"):
        _prepare(loss=whole, optimizers=[two, one])
    model = _model()
    built = [torch.optim.SGD(part, lr=0.1) for part in (model[0].parameters(), model[1].parameters())]
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"1 optimizer\(s\) have parameters of several sub-steps"):
        _prepare(model=model, loss=halves, optimizers=[*built, both])
    # Each clears the gradients that it has used: within a turn the second would find none, and turns have their own.
    with pytest.raises(
        PlanError, match=r"2 parameter\(s\) are in two optimizers, SGD and SGD, .*: 1\.weight, 1\.bias\. "
    ):
        _prepare(model=model, optimizers=[both, built[1]])
    turns = [SubStep("b", Regression(), "1.*"), SubStep("all", Regression())]
    assert [
        len(turn.parameters) for turn in _prepare(model=model, loss=turns, optimizers=[built[1], both]).assembly.turns
    ] == [2, 4]


def test_optimizers_know_the_ranks_that_share_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmati.train.prepare.Ranks", SecondOfTwo)
    a = _prepare(num_microbatches=2, optimizers=[Muon(lr=0.1, parameters="*.weight"), AdamW(lr=0.1)]).assembly
    assert list(a.layout.mine) == [1]
    muon, adamw = (scheduled.optimizer for scheduled in a.optimizers)
    assert (muon.sharing.rank, muon.sharing.world) == (1, 2)
    assert not hasattr(adamw, "sharing")


# -------------------------------------------------------------------------------------------------------- compilation


@dataclass(frozen=True, kw_only=True)
class Shapes(Method):
    """Says that it gives so many shapes."""

    num: int
    stage: ClassVar[Stage] = Stage.SHAPE

    def shapes(self, budget: Budget) -> int:
        return self.num


def test_shapes_beyond_the_limit_of_recompilation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    limit = torch._dynamo.config.recompile_limit
    assert limit == 8
    many = [Shapes(num=2), Shapes(num=5)]
    assert _prepare(methods=many).assembly.plan.methods == tuple(many)
    _prepare(methods=[Shapes(num=2), Shapes(num=4)], compile_blocks=True)
    with pytest.raises(PlanError, match=r"up to 10 input shapes, and compiled blocks may be recompiled 8 times"):
        _prepare(methods=many, compile_blocks=True)


def test_blocks_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((self, options)))
    listed = nn.Module()
    listed.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU())])
    listed.head = nn.Sequential(nn.Linear(1, 1))
    compile_blocks(listed)
    assert compiled == [(block, {"dynamic": False}) for block in listed.blocks]
    compiled.clear()
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    compile_blocks(model)
    assert [block for block, _ in compiled] == [model[0], model[2]]
    compiled.clear()
    _prepare()
    assert compiled == []
    _prepare(compile_blocks=True)
    assert len(compiled) == 2


def test_sharded_blocks_are_compiled_without_their_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[object, dict[str, Any]]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append((function, options)))
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    forwards = [model[0].forward, model[2].forward]
    compile_blocks(model, is_sharded=True)
    assert compiled == [(forward, {"dynamic": False}) for forward in forwards]


def test_what_is_compiled_is_known_and_followed_as_what_it_was() -> None:
    """The compiler's marks are unlike on each rank; what the function keeps is looked at."""
    kept = {"calls": 0}

    def forward(x: Tensor) -> Tensor:
        kept["calls"] += 1
        return x

    plain, by_itself, inside = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    by_itself.compile(backend="eager")
    inside.forward = torch.compile(forward, backend="eager")
    assert [is_compiled(module) for module in (plain, by_itself, inside)] == [False, True, True]
    found = {place.name for place in places_in({"": inside})}
    assert [path for path in found if "_torchdynamo" in path] == []
    assert [path for path in found if path.endswith("kept")] != []


@pytest.mark.parametrize("is_training", [True, False])
def test_a_model_in_evaluation_mode_is_told_and_left_as_it_is(is_training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout()).train(is_training)
    told = nullcontext() if is_training else pytest.warns(UserWarning, match=r"evaluation mode.*model\.train\(\)")
    with told:
        Trainer(model, Classification(2), optimizers=[SGD(lr=0.1)])
    assert model.training == is_training
    # A part in evaluation mode is meant: nothing is said.
    model.train()
    model[1].eval()
    Trainer(model, Classification(2), optimizers=[SGD(lr=0.1)])
