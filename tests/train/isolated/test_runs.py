"""Whole runs with what is a class's own: against rows alone in float64, on two ranks, killed, dropped."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.core.batch import Batch, Data
from cosmati.core.isolated import isolated_modules, running
from cosmati.core.loss import Loss
from cosmati.core.plan import Promise
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import PlanError
from cosmati.methods import EMA, IsolatedAdapters
from cosmati.methods.functional import drop_isolated, enabled_classes
from cosmati.optim import SGD
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer
from tests.processes import launch_ranks, run_python
from tests.train.isolated.samples import (
    CASES,
    CLASSES,
    Case,
    cnn,
    differing,
    fitted,
    others,
    policy,
    promise,
    source,
    trainer,
)
from tests.train.isolated.worker import made

pytestmark = pytest.mark.long

WORKER = Path(__file__).with_name("worker.py")
MLP = CASES["MLP, low rank"]
NORMLESS = dataclasses.replace(CASES["Conv1d"], build=lambda: cnn(conv=nn.Conv1d, norm=nn.Identity))


def filled(case: Case) -> nn.Module:
    """Return the case's model, whose adapters have learnt something, without dropout."""
    torch.manual_seed(0)
    network = case.adapters.apply(case.build())
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    for module in isolated_modules(network).values():
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return network


def by_row(network: nn.Module, batches: list[Batch], case: Case) -> dict[str, Tensor]:
    """Return the gradients of each row alone, over the rows that may teach a parameter."""
    total = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    teachers = dict.fromkeys(total, 0.0)
    for batch in batches:
        assert batch.class_id is not None
        name = CLASSES[batch.class_id]
        for row in range(batch.num_rows):
            network.zero_grad()
            with running(isolated_modules(network).values(), {name: True}):
                loss = case.loss(network, batch.select(slice(row, row + 1)).data)
            loss.sum.backward()
            for key, parameter in network.named_parameters():
                if ("isolated" in key) == (name == "personal"):
                    total[key] += parameter.grad if parameter.grad is not None else 0
                    teachers[key] += float(loss.weight)
    return {name: value / teachers[name] for name, value in total.items()}


@pytest.mark.parametrize("name", ["Conv1d, no norm", *(n for n in CASES if "Norm" not in n and n != "Conv1d")])
def test_gradients_equal_a_loop_over_rows_in_float64(name: str) -> None:
    case = NORMLESS if name == "Conv1d, no norm" else CASES[name]
    network = filled(case).double()
    data = source(case)
    if not isinstance(data.data, Tensor):
        data = type(data)((data.data[0].double(), data.data[1]), 16, data.class_ids, CLASSES)
    batches = [data.order(seed=0, num_microbatches=4, route_pure=True).microbatch(0, index) for index in range(4)]
    start = {key: p.detach().clone() for key, p in network.named_parameters()}
    expected = by_row(network, batches, case)
    fitted(Case(lambda: network, case.rows, case.adapters, case.loss), data, [SGD(lr=1.0)], budget="1ba")
    for key, parameter in network.named_parameters():
        # LanguageModel takes its logarithms in float32.
        exact = {"rtol": 2e-4, "atol": 2e-6} if name.startswith("GPT") else {"rtol": 1e-7, "atol": 1e-9}
        torch.testing.assert_close(start[key] - parameter.detach(), expected[key], **exact)


QUICK = ("MLP, low rank", "CNN, expert with BatchNorm", "attention")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_swapped_rows_move_nothing_outside_of_their_class(name: str) -> None:
    case = CASES[name]
    one, two = (fitted(case, source(case, swapped=swapped)) for swapped in (False, True))
    assert promise(one).holds, promise(one)
    assert not differing(others(one), others(two))
    assert differing(dict(one.model.state_dict()), dict(two.model.state_dict())), "the control: its own differ"


@pytest.mark.parametrize("name", ["MLP, low rank", "GPT, expert", "CNN with BatchNorm"])
def test_dropped_it_is_the_run_that_never_saw_the_class(name: str) -> None:
    case, data = CASES[name], source(CASES[name])
    names = case.build().state_dict().keys()
    present = fitted(case, data)
    dropped = drop_isolated(present.model, "personal")
    # It has no adapters, and every row of the class is a tombstone: what it may teach doesn't matter.
    bare = Case(case.build, case.rows, IsolatedAdapters(), case.loss)
    rules = "version: 1\ntaxonomy: t\nregions: {all: {params: '*'}}\nrules: [{class: '**', weight: 1}]\n"
    never = fitted(bare, Tombstoned(data, ["personal"]), chosen=load_policy(rules))
    assert dropped.state_dict().keys() == names == never.model.state_dict().keys()
    assert not differing(dict(dropped.state_dict()), dict(never.model.state_dict()))
    assert [type(m) for m in dropped.modules()] == [type(m) for m in never.model.modules()]


def test_single_rows_may_be_gone() -> None:
    data = source(MLP)
    chosen = [row for row in range(data.num_rows) if row % 3 == 1][:5]
    present, gone = fitted(MLP, data), fitted(MLP, Tombstoned(data, rows=chosen))
    assert not differing(others(present), others(gone))
    assert differing(dict(present.model.state_dict()), dict(gone.model.state_dict()))


def test_two_classes_each_with_its_own() -> None:
    case = Case(MLP.build, MLP.rows, IsolatedAdapters(classes=("personal", "other"), rank=2))
    regions = (
        "{trunk: {params: '*', exclude: '*.isolated.*'}, own: {tag: isolated/personal}, another: {tag: isolated/other}}"
    )
    rules = (
        "  - {class: '**', region: another, weight: 0}\n  - {class: other, region: another, weight: 1}\n"
        "  - {class: other, region: trunk, weight: 0}\n  - {class: personal, region: another, weight: 0}\n"
        "  - {class: other, region: own, weight: 0}\n"
    )
    data = source(case)
    present = fitted(case, data, chosen=policy(regions=regions, rules=rules))
    gone = fitted(case, Tombstoned(data, ["personal"]), chosen=policy(regions=regions, rules=rules))
    assert present.plan.holds(Promise.ISOLATED, ("personal", "own"))
    assert present.plan.holds(Promise.ISOLATED, ("other", "another"))
    assert not differing(others(present), others(gone))
    # What a class begins with doesn't follow from which others there are.
    alone = MLP.adapters.apply(MLP.build()).state_dict()
    begun = case.adapters.apply(MLP.build()).state_dict()
    assert all(torch.equal(alone[n], begun[n]) for n in alone if "personal" in n)
    downs = [value.flatten()[:6] for name, value in begun.items() if name.endswith("down")]
    assert len({tuple(value.tolist()) for value in downs}) == len(downs) == 6, "three layers of two classes"


class Checkpointed(nn.Module):
    """Layers that run anew in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP.build()

    def forward(self, rows: Tensor) -> Tensor:
        return checkpoint(self.layers, rows, use_reentrant=False)


def test_layers_that_run_anew_in_the_backward_pass_are_the_class_s_then_too() -> None:
    plain = Case(lambda: nn.ModuleDict({"layers": MLP.build()}), MLP.rows, MLP.adapters, _of_layers)
    one, two = (fitted(case, source(case)) for case in (dataclasses.replace(MLP, build=Checkpointed), plain))
    assert not differing(dict(one.model.state_dict()), dict(two.model.state_dict()))
    assert promise(one).holds


def _of_layers(model: nn.Module, data: Data) -> Loss:
    return MLP.loss(model["layers"], data)  # type: ignore[index, return-value]


def test_more_classes_than_blocks_are_compiled_for_are_refused() -> None:
    names = [f"c{index}" for index in range(9)]
    case = Case(MLP.build, MLP.rows, IsolatedAdapters(classes=names))
    with pytest.raises(PlanError, match=r"up to 10 input shapes.* fewer classes with something of their own"):
        Trainer(
            case.build(),
            case.loss,
            source(case),
            optimizers=[SGD(lr=0.1)],
            methods=[case.adapters],
            config=RunConfig(budget="2ba", compile_blocks=True),
        )


class StopAt(Observer):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_open(self, run: object) -> None:
        self.run = run

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_stopped_and_resumed_it_is_the_same(tmp_path: Path) -> None:
    whole, data = fitted(MLP, source(MLP), None, [EMA(half_life="2ba")]), source(MLP)
    for step in (2, 5, 0):
        run = fitted(
            MLP,
            data,
            None,
            [EMA(half_life="2ba")],
            observers=[StopAt(step)] if step else [],
            config={"run_folder": tmp_path},
        )
    assert run.clock.step == 6
    assert not differing(dict(run.model.state_dict()), dict(whole.model.state_dict()))
    assert promise(run).holds


def test_a_promise_that_was_broken_stays_so(tmp_path: Path) -> None:
    class Ends(Observer):
        def on_open(self, run: object) -> None:
            self.run = run

        def on_step(self, report: StepReport) -> None:
            if report.clock.step == 2:
                self.run.stop("enough")  # type: ignore[attr-defined]

    for observers in ([Ends()], []):
        run = fitted(MLP, source(MLP), observers=observers, config={"run_folder": tmp_path})
    assert run.clock.step == 6
    assert "enough" in promise(run).because


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ({"trunk": "0.5"}, "an earlier policy let rows of personal teach 'trunk' in steps 0 to 1"),
        ({"own": "1"}, "open, other may teach 'own', too"),
    ],
)
def test_what_an_earlier_policy_let_through_stays_so(before: dict[str, str], reason: str, tmp_path: Path) -> None:
    first = fitted(MLP, source(MLP), chosen=policy(**before), observers=[StopAt(2)], config={"run_folder": tmp_path})
    assert not promise(first).holds
    chosen, config = policy(name="renamed"), {"run_folder": tmp_path, "change": "policy"}
    changed = fitted(MLP, source(MLP), chosen=chosen, config=config)
    assert changed.clock.step == 6
    (found,) = [g for g in changed.plan.guarantees if g.promise is Promise.ISOLATED]
    assert (found.pair, found.holds) == (("personal", "renamed"), False)
    assert reason in found.because
    again = trainer(MLP, source(MLP))
    assert promise(again).holds, "the control: another run under the policy"


def test_an_evaluation_names_the_classes_that_run() -> None:
    data = source(MLP)
    rows = [data.data]
    named = {
        "shared": Evaluation(rows, MLP.loss),
        "personal": Evaluation(rows, MLP.loss, classes="personal"),
    }
    run = fitted(MLP, data, [SGD(lr=1.0)], evaluation=named)
    found = run.fit().metrics
    with torch.no_grad(), enabled_classes(run.model.eval(), "personal"):
        expected = MLP.loss(run.model, data.data).mean()
    assert found["personal/Classification"] == pytest.approx(float(expected))
    assert found["shared/Classification"] != found["personal/Classification"]
    with pytest.raises(PlanError, match="nothing of class 'persnal' to enable"):
        fitted(MLP, data, evaluation=Evaluation(rows, MLP.loss, classes="persnal"))


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same(tmp_path: Path) -> None:
    done = run_python([WORKER, tmp_path, "3"])
    assert done.returncode == -signal.SIGKILL, done.stderr
    run, whole, gone = made(tmp_path / "run"), made(None), made(None, gone=True)
    for one in (run, whole, gone):
        one.fit()
    assert promise(run).holds
    assert not differing(others(run), others(whole))
    assert not differing(others(run), others(gone))


@pytest.mark.slow
def test_two_ranks_give_the_same(tmp_path: Path) -> None:
    launch_ranks([WORKER, tmp_path], 2)
    found = torch.load(tmp_path / "facts.pt")
    present, gone = found["present"], found["gone"]
    assert present.pop("promise").startswith("holds")
    gone.pop("promise")
    run = made(None)
    run.fit()
    assert not differing(present, gone)
    assert not differing(present, others(run))
