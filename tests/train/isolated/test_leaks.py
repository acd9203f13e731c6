"""What would carry a class out of what is its own: each holds in bits, or the plan withdraws the promise by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Data
from cosmati.core.isolated import isolated_modules
from cosmati.core.loss import Loss
from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.core.plan import Promise
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import PlanError, PolicyError
from cosmati.methods import (
    EMA,
    SAM,
    SWA,
    GradientClipping,
    IsolatedAdapters,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    SelectiveBackprop,
)
from cosmati.optim import SGD, SGDW, SOAP, AdamW, Aurora, Lion, NorMuon, ScheduleFreeAdamW, Sophia
from cosmati.train import gradients
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy
from cosmati.train.foreign_reads import foreign_read
from cosmati.train.ingredients import AnyOptimizer
from cosmati.train.observers import EarlyStopping, Observer, StepReport, Threshold
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.opening import without_ends
from cosmati.train.trainer import Trainer
from tests.train.isolated.samples import (
    CASES,
    THREE,
    Case,
    differing,
    fitted,
    others,
    policy,
    promise,
    sampled,
    source,
    trainer,
)

pytestmark = pytest.mark.long

MLP, CNN = CASES["MLP, low rank"], CASES["CNN with BatchNorm"]
CLIPPING = {"clipping_type": "norm", "clipping_threshold": 0.01}
METHODS: dict[str, Callable[[], list[Method]]] = {
    "EMA": lambda: [EMA(half_life="2ba", update_interval="1ba")],
    "EMA, rarely": lambda: [EMA(half_life="2ba", update_interval="3ba")],
    "SWA": lambda: [SWA(swa_start="0.3dur", swa_end="1dur", update_interval="1ba")],
    "clipping by region": lambda: [GradientClipping(**CLIPPING, per_region=True)],  # type: ignore[arg-type]
    "freezing": lambda: [LayerFreezing(freeze_start=0.5)],
    "mixing": lambda: [MixUp(), LabelSmoothing()],
    "selection": lambda: [SelectiveBackprop(start=0.0, end=1.0, keep=0.5)],
}
OTHERS: dict[str, Callable[[], list[AnyOptimizer]]] = {
    "SGDW": lambda: [SGDW(lr=0.1, momentum=0.9, weight_decay=0.01)],
    "Aurora": lambda: [Aurora(lr=0.02), AdamW(lr=0.01, cautious=True)],
    "Lion": lambda: [Lion(lr=0.01)],
    "NorMuon": lambda: [NorMuon(lr=0.02), AdamW(lr=0.01)],
    "SOAP": lambda: [SOAP(lr=0.01)],
    "Sophia": lambda: [Sophia(lr=0.01, num_labels=4)],
    "ScheduleFreeAdamW": lambda: [ScheduleFreeAdamW(lr=0.01)],
}


def both(case: Case, *args: Any, **options: Any) -> tuple[Trainer, Trainer]:
    """Return the run with the class present, and tombstoned."""
    data = source(case)
    return fitted(case, data, *args, **options), fitted(case, Tombstoned(data, ["personal"]), *args, **options)


@pytest.mark.parametrize(("name", "num_microbatches"), sampled(METHODS, [1, 4]))
def test_methods_carry_nothing_out(name: str, num_microbatches: int) -> None:
    present, gone = both(CNN, None, METHODS[name](), num_microbatches=num_microbatches, budget="8ba")
    assert promise(present).holds, promise(present)
    # Averages' BatchNorm statistics are computed anew, from rows that may teach them.
    assert not differing(others(present, averaged=True), others(gone, averaged=True))


@pytest.mark.parametrize(("name", "num_microbatches"), sampled(OTHERS, [4, 1]))
def test_optimizers_carry_nothing_out(name: str, num_microbatches: int) -> None:
    present, gone = both(MLP, OTHERS[name](), num_microbatches=num_microbatches, budget="8ba")
    assert promise(present).holds, promise(present)
    assert not differing(others(present, averaged=True), others(gone, averaged=True))


@pytest.mark.parametrize(
    ("method", "reason"),
    [(GradientClipping(**CLIPPING), "GradientClipping"), (SAM(rho=0.05), "SAM")],  # type: ignore[arg-type]
)
def test_norms_over_everything_are_named(method: Method, reason: str) -> None:
    present, gone = both(MLP, [SGD(lr=0.1)], [method])
    assert not promise(present).holds
    assert reason in promise(present).because
    assert differing(others(present), others(gone)), "the control leaks"


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"trunk": "0.5"}, ["personal may teach trunk, too: give it weight 0 there"]),
        ({"own": "1"}, ["open, other may teach 'own', too: give them weight 0 there"]),
        (
            {
                "regions": "{trunk: {params: '*', exclude: ['*.isolated.*', '5.*']},"
                " own: {params: ['5.*', '*.isolated.*']}}"
            },
            ["rows of other classes read 5.weight, 5.bias of 'own', too", "tag: isolated/personal"],
        ),
    ],
)
def test_a_policy_that_doesnt_confine_is_named_with_the_mend(options: dict[str, str], reasons: Sequence[str]) -> None:
    run = trainer(MLP, source(MLP), chosen=policy(**options))
    assert not promise(run).holds
    assert all(reason in promise(run).because for reason in reasons), promise(run).because


def test_a_parameter_that_others_hold_too_is_nobodys_own() -> None:
    def build() -> nn.Module:
        model = IsolatedAdapters(classes="personal", rank=2).apply(MLP.build())
        model.tied = nn.ParameterList([model.get_parameter("0.isolated.personal.matrix.up")])
        model.__class__ = Tied
        return model

    case = Case(build, MLP.rows, MLP.adapters)
    with pytest.raises(PolicyError, match="one tied parameter is spread"):
        trainer(case, source(case))
    run = trainer(case, source(case), chosen=policy(rules="allow: {tied: true}\n"))
    (found,) = [g for g in run.plan.guarantees if g.name == "isolated(personal, own&trunk)"]
    assert not found.holds
    assert "rows of other classes read 0.isolated.personal.matrix.up" in found.because


class Tied(nn.Sequential):
    """Layers, and a parameter that one of them holds, too."""

    def forward(self, rows: Tensor) -> Tensor:
        for layer in list(self.children())[:6]:
            rows = layer(rows)
        return rows + self.tied[0].sum()


def test_statistics_of_no_one_region_are_named() -> None:
    case = Case(lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False), *MLP.build()), MLP.rows, MLP.adapters)
    regions = (
        "{trunk: {params: ['1.weight', '1.bias']}, upper: {params: '*', exclude: ['*.isolated.*', '1.*']},"
        " own: {tag: isolated/personal}}"
    )
    chosen = policy(regions=regions, rules="  - {class: personal, region: upper, weight: 0}\n")
    present, gone = both(case, chosen=chosen)
    assert "statistics of 0 lie in no one region" in promise(present).because
    assert differing(others(present), others(gone)) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


class Counting(nn.Module):
    """A module of forward state: what it has seen is part of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(rows.mean(0), 0.5)
        return rows - self.mean


def test_forward_state_is_named() -> None:
    case = Case(lambda: nn.Sequential(Counting(), *MLP.build()), MLP.rows, MLP.adapters)
    present, gone = both(case)
    assert "buffers 0.mean" in promise(present).because
    assert differing(others(present), others(gone))


def test_a_penalty_on_the_spread_of_weights_is_found() -> None:
    """What doesn't follow from means and sizes."""

    def loss(model: nn.Module, data: Data) -> Loss:
        found = THREE(model, data)
        spread = torch.stack([p.std() for p in model.parameters() if p.numel() > 1]).prod()
        return Loss(found.sum + spread, found.weight)

    assert "personal's own" in promise(fitted(MLP, source(MLP), loss=loss, budget="1ba")).because


def test_a_loss_that_isnt_the_same_twice_is_named() -> None:
    def loss(model: nn.Module, data: Data) -> Loss:
        found = THREE(model, data)
        return Loss(found.sum * (1 + int.from_bytes(os.urandom(4)) / 2**40), found.weight)

    assert "isn't the same twice" in promise(fitted(MLP, source(MLP), loss=loss, budget="4ba")).because


def test_memory_that_was_short_for_a_class_is_told_to_all() -> None:
    def loss(model: nn.Module, data: Data) -> Loss:
        if len(data[0]) > 2 and any(m.is_enabled for m in isolated_modules(model).values()):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return THREE(model, data)

    with pytest.warns(UserWarning, match="Memory is too short"):
        run = fitted(MLP, source(MLP), loss=loss)
    assert "memory was short" in promise(run).because
    assert run.plan.holds(Promise.NO_DIRECT_WRITE, ("personal", "trunk"))


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("shapes don't fit"), False),
    ],
)
def test_memory_that_is_too_short_for_a_second_look_withdraws_the_promise(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_told: bool
) -> None:
    def fails(batch: Batch) -> Loss:
        raise error

    monkeypatch.setattr(
        gradients, "foreign_read", lambda m, loss, layout, _, b: foreign_read(m, loss, layout, fails, b)
    )
    if not is_told:
        with pytest.raises(RuntimeError, match="shapes don't fit"):
            fitted(MLP, source(MLP))
        return
    run = fitted(MLP, source(MLP))
    assert "memory was too short to see who reads what is a class's own" in promise(run).because
    monkeypatch.undo()
    assert not differing(others(run), others(fitted(MLP, source(MLP))))


@pytest.mark.parametrize("detached", [False, True])
def test_a_penalty_on_all_weights_is_found(detached: bool) -> None:
    """Its gradient leads nowhere that is denied, and it still tells every region of every adapter."""

    def loss(model: nn.Module, data: Data) -> Loss:
        found = THREE(model, data)
        squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        if detached:
            return Loss(found.sum * squares.detach(), found.weight)
        return Loss(found.sum, found.weight, aux={"penalty": squares.sqrt()})

    present, gone = both(MLP, loss=loss)
    assert "the loss of other rows reads what is personal's own: leave it out of penalties" in promise(present).because
    assert differing(others(present), others(gone)), "the control leaks"
    # It's no direct write: the rows of the class themselves teach nothing there.
    assert present.plan.holds(Promise.NO_DIRECT_WRITE, ("personal", "trunk"))


class Peeks(nn.Sequential):
    """Layers that look for what is a class's own, whoever's rows run."""

    def forward(self, rows: Tensor) -> Tensor:
        own = [p for name, p in self.named_parameters() if "isolated" in name]
        return super().forward(rows) * (1 + torch.stack([p.detach().abs().sum() for p in own]).sum())


def test_a_model_that_peeks_is_found() -> None:
    case = Case(lambda: Peeks(*MLP.build()), MLP.rows, MLP.adapters)
    present, gone = both(case)
    assert "personal's own" in promise(present).because
    assert differing(others(present), others(gone))


def test_looking_changes_no_bit_and_no_rows() -> None:
    """The look runs the microbatch twice more: draws, statistics, state and rows have to stay as they are."""

    def loss(model: nn.Module, data: Data) -> Loss:
        data[0].sub_(1)  # in place, as some normalise
        return THREE(model, data)

    looks: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "foreign_read", lambda *given: looks.append(foreign_read(*given)))
        looked = fitted(CNN, source(CNN), loss=loss)
        patch.setattr(gradients, "foreign_read", lambda *_: "")
        unlooked = fitted(CNN, source(CNN), loss=loss)
    assert looks == [""] * 4 * 4, "four microbatches in each of the steps 0, 1, 2, 4"
    assert not differing(dict(looked.model.state_dict()), dict(unlooked.model.state_dict()))


class Stops(Observer):
    """Ends the run by a loss, as one of the user's own may."""

    def on_open(self, run: WatchedRun) -> None:
        self.run = run

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == 3 and float(report.loss) > 0:
            self.run.stop("the loss is positive")


@pytest.mark.parametrize(
    ("observer", "reason"),
    [
        (EarlyStopping("accuracy", higher_is_better=True), "EarlyStopping may end the run"),
        (Threshold("accuracy", above=2.0), "Threshold may end the run"),
    ],
)
def test_whoever_may_end_the_run_is_named_before_it(observer: Observer, reason: str) -> None:
    data = source(MLP)
    run = trainer(MLP, data, observers=[observer], evaluation=Evaluation([data.data], accuracy))
    assert reason in promise(run).because
    assert run.plan.holds(Promise.NO_DIRECT_WRITE, ("personal", "trunk"))
    # Whatever else is promised, or isn't.
    whole = trainer(MLP, source(MLP)).plan
    alone = dataclasses.replace(whole, guarantees=tuple(g for g in whole.guarantees if g.promise is Promise.ISOLATED))
    assert alone.guarantees
    assert not any(guarantee.holds for guarantee in without_ends(alone, [observer]).guarantees)


def test_a_stop_by_the_users_own_observer_is_named() -> None:
    run = trainer(MLP, source(MLP), observers=[Stops()])
    assert promise(run).holds
    run.fit()
    assert "the run was stopped: the loss is positive" in promise(run).because


def test_a_rate_that_follows_the_loss_is_named() -> None:
    class Plateau(Observer):
        def on_step(self, report: StepReport) -> None:
            for scheduled in run.assembly.optimizers:
                scheduled.optimizer.param_groups[0]["lr"] *= 0.5

    model = MLP.build()
    run = trainer(Case(lambda: model, MLP.rows, MLP.adapters), source(MLP), observers=[Plateau()])
    run = trainer(
        Case(lambda: model, MLP.rows, MLP.adapters),
        source(MLP),
        [torch.optim.SGD(model.parameters(), lr=0.1)],
        observers=[Plateau()],
    )
    run.fit()
    assert "learning rate" in promise(run).because


def test_a_step_that_was_left_out_is_named() -> None:
    def loss(model: nn.Module, data: Data) -> Loss:
        found = THREE(model, data)
        return Loss(found.sum * (torch.nan if float(data[0][0, 0]) > 1.0 else 1.0), found.weight)

    run = fitted(MLP, source(MLP), loss=loss, config={"on_divergence": "skip"})
    assert "was left out" in promise(run).because


def test_without_a_policy_it_rests_and_the_plan_says_so() -> None:
    model, data = MLP.build(), source(MLP)
    config = RunConfig(budget="2ba", num_threads=1)
    run = Trainer(model, MLP.loss, data, optimizers=[SGD(lr=0.1)], methods=[MLP.adapters], config=config)
    before = {n: p.clone() for n, p in run.model.named_parameters()}
    run.fit()
    moved = differing(before, dict(run.model.named_parameters()))
    assert moved == [n for n in before if "isolated" not in n]
    assert "broken  isolated(personal, all): without a policy nobody says whose rows these are" in str(run.plan)


def test_a_class_that_the_taxonomy_lacks_is_refused() -> None:
    case = Case(MLP.build, MLP.rows, IsolatedAdapters(classes="persnal"))
    regions = "{trunk: {params: '*', exclude: '0.isolated.*'}, own: {params: '0.isolated.*'}}"
    with pytest.raises(PlanError, match=r"'persnal', and the taxonomy has no such class: it has open, other, personal"):
        trainer(case, source(case), chosen=policy(regions=regions))


class CountsTogether(torch.optim.Optimizer):
    """Descent whose rate falls with the steps of a whole group, as published schedule-free optimizers count."""

    couples: ClassVar[frozenset[Coupling]] = frozenset()

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])


def test_an_optimizer_that_counts_for_all_is_named() -> None:
    """It leaves regions apart in what they learn, and tells each of them in how many steps the class has learnt."""

    def run(data: Any) -> Trainer:
        torch.manual_seed(0)
        model = MLP.adapters.apply(MLP.build())
        case = Case(lambda: model, MLP.rows, MLP.adapters)
        return fitted(case, data, [CountsTogether(model.parameters())], num_microbatches=1)

    data = source(MLP)
    present, gone = run(data), run(Tombstoned(data, ["personal"]))
    assert "CountsTogether counts the steps in which another region alone has learnt" in promise(present).because
    assert present.plan.holds(Promise.NO_DIRECT_WRITE, ("personal", "trunk"))
    assert differing(others(present), others(gone)), "the control leaks"


@dataclass(frozen=True, kw_only=True)
class Notes(Method):
    """Notes which classes are enabled where methods may score rows."""

    stage: ClassVar[Stage] = Stage.SELECT
    couples: ClassVar[frozenset[Coupling]] = frozenset()  # type: ignore[misc, assignment]
    seen: ClassVar[list[tuple[int | None, list[bool]]]] = []

    def batch(self, batch: Batch, at: Position) -> Batch:
        enabled = {module.is_enabled for module in isolated_modules(at.model).values()}
        self.seen.append((batch.class_id, sorted(enabled)))
        return batch


def test_methods_score_rows_with_what_is_their_own() -> None:
    Notes.seen.clear()
    run = fitted(MLP, source(MLP), None, [Notes()], budget="2ba")
    assert {(class_id, *enabled) for class_id, enabled in Notes.seen} == {(0, False), (1, True), (2, False)}
    assert not any(module.is_enabled for module in isolated_modules(run.model).values())


def test_averages_get_the_statistics_of_an_experts_norm_from_its_own_rows() -> None:
    case = CASES["CNN, expert with BatchNorm"]
    run = fitted(case, source(case), None, [EMA(half_life="2ba")])
    (expert,) = isolated_modules(run.model).values()
    norm = expert.get_submodule("expert.norm")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    own = norm.running_mean.clone()
    with run.averaged():
        # A plain mean over the first eight steps' passes, not the running one.
        assert not torch.equal(norm.running_mean, own)
    assert torch.equal(norm.running_mean, own)
