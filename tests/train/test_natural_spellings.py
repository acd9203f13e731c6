"""What people write first works, or the error has the line that does."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import Classification, Evaluation, InMemory, Loss, Observer, RunConfig, Stateful, Trainer, accuracy
from cosmati.core.method import Method, Stage
from cosmati.errors import DataError, PlanError
from cosmati.methods import ALL, EMA, LabelSmoothing
from cosmati.optim import SGD, AdamW, Constant, Cosine, CosineWarmRestarts, Polynomial, Step
from cosmati.train.observers import EarlyStopping, History

ROWS = (torch.arange(96.0).reshape(24, 4).sin(), torch.arange(24) % 3)


def trained(**changes: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    torch.manual_seed(0)
    given = {"optimizers": [SGD(lr=0.1)], "config": RunConfig(budget="2ep", progress=False)} | changes
    trainer = Trainer(nn.Linear(4, 3), Classification(3), InMemory(ROWS, 8), **given)
    return dict(trainer.model.state_dict()), dict(trainer.fit().metrics)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_one_method_or_optimizer_needs_no_list() -> None:
    listed, _ = trained(optimizers=[SGD(lr=0.1)], methods=[LabelSmoothing(smoothing=0.2)])
    alone, _ = trained(optimizers=SGD(lr=0.1), methods=LabelSmoothing(smoothing=0.2))
    assert same(listed, alone)
    assert not same(alone, trained()[0])


def test_an_optimizer_of_pytorchs_needs_no_list_either() -> None:
    found = []
    for is_listed in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(
            model,
            Classification(3),
            InMemory(ROWS, 8),
            optimizers=[optimizer] if is_listed else optimizer,
            config=RunConfig(budget="2ep", progress=False),
        ).fit()
        found.append(model.state_dict())
    assert same(*found)


def mean_logit(model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
    return Loss(model(data[0]).mean(1).sum(), float(len(data[0])))


class Largest:
    def reset(self) -> None:
        self.largest = 0.0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.largest = max(self.largest, float(output.max()))

    def compute(self) -> float:
        return self.largest


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (accuracy, {"accuracy"}),
        ([accuracy, mean_logit], {"accuracy", "mean_logit"}),
        ((accuracy, Stateful(Largest())), {"accuracy", "Largest"}),
        (Largest(), {"Largest"}),
    ],
)
def test_metrics_in_a_list_or_alone_are_called_as_they_are(given: Any, names: set[str]) -> None:
    by_name = {"accuracy": accuracy, "mean_logit": mean_logit, "Largest": Stateful(Largest())}
    expected = trained(evaluation=Evaluation([ROWS], {name: by_name[name] for name in names}))[1]
    assert trained(evaluation=Evaluation([ROWS], given))[1] == expected
    assert set(expected) == names


@pytest.mark.parametrize("given", [[accuracy, accuracy], [lambda model, data: 0.0], lambda model, data: 0.0])
def test_metrics_without_names_of_their_own_are_asked_for_them(given: Any) -> None:
    with pytest.raises(ValueError, match=r"(accuracy|<lambda>)\. Name them: Evaluation\(data, \{'accuracy': \.\.\."):
        Evaluation([ROWS], given)


@pytest.mark.parametrize("name", ["step", "rows", "tokens", "seconds"])
def test_no_metric_takes_a_name_of_the_clock(name: str) -> None:
    """Its value would stand in place of the clock's in every line of the run's evaluations."""
    with pytest.raises(ValueError, match=f"A metric is called '{name}'.*Give it another one: .'mean {name}'"):
        Evaluation([ROWS], {"accuracy": accuracy, name: accuracy})


@pytest.mark.parametrize(
    ("made", "call"),
    [
        (lambda: LabelSmoothing(0.1), r"LabelSmoothing\(smoothing=0\.1\)"),
        (lambda: EMA("10ba"), r"EMA\(half_life='10ba'\)"),
        (lambda: SGD(0.1), r"SGD\(lr=0\.1\)"),
        (lambda: SGD(0.1, momentum=0.9), r"SGD\(lr=0\.1, momentum=0\.9\)"),
    ],
)
def test_settings_without_names_are_told_by_which(made: Callable[[], object], call: str) -> None:
    with pytest.raises(TypeError, match=f"takes its settings by name: {call}"):
        made()


def test_every_method_tells_its_first_setting() -> None:
    for kind in ALL:
        names = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
        if names:
            with pytest.raises(TypeError, match=rf"{kind.__name__}\({names[0]}=7\)"):
                kind(7)  # type: ignore[call-arg]


def test_a_tuple_of_tensors_is_no_list_of_batches() -> None:
    options = {"optimizers": SGD(lr=0.1), "config": RunConfig(budget="1ep", progress=False)}
    with pytest.raises(DataError, match=r"Give InMemory\(data, rows_per_step=32\) to train on"):
        Trainer(nn.Linear(4, 3), Classification(3), ROWS, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"batches\(data, 32\) to evaluate on"):
        Evaluation(ROWS, accuracy)


def test_a_class_of_the_users_own_may_take_what_it_likes() -> None:
    class Plain(Method):
        stage = Stage.LABEL

        def __init__(self, amount: float, *, more: int = 0) -> None:
            self.amount, self.more = amount, more

    assert (Plain(3.0).amount, Plain(3.0, more=2).more) == (3.0, 2)
    with pytest.raises(TypeError, match="positional arguments"):
        Plain(1.0, 2)  # type: ignore[misc]


@pytest.mark.parametrize("kind", [partial(LabelSmoothing, smoothing=0.3), partial(SGD, lr=0.2, schedule=Cosine())])
def test_configurations_are_copied_and_pickled_as_before(kind: Callable[[], object]) -> None:
    one = kind()
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == dataclasses.replace(one) == one  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Cosine(T_max="5ep"), r"no 'T_max'\. Here it's Cosine\(t_max='5ep'\)"),
        (lambda: Cosine(alpha_f=0.1), r"Here it's Cosine\(final=0\.1\)"),
        (lambda: Cosine(eta_min=0.01), r"Here it's Cosine\(final=0\.01 / lr\)"),
        (lambda: Step(step_size="3ep"), r"Here it's Step\(every='3ep'\)"),
        (lambda: Constant(gamma=0.1), r"Constant has no 'gamma'\. It has warmup\."),
        (lambda: SGD(lr=0.1, momentun=0.9), r"no 'momentun'\. Here it's SGD\(momentum=0\.9\)"),
        (lambda: AdamW(learning_rate=0.1), r"Here it's AdamW\(lr=0\.1\)"),
        (lambda: LabelSmoothing(alpha=0.1), r"LabelSmoothing has no 'alpha'\. It has smoothing\."),
        (lambda: RunConfig(max_epochs=3), r"Here it's RunConfig\(budget='3ep'\)"),
        (lambda: RunConfig(max_steps=100), r"Here it's RunConfig\(budget='100ba'\)"),
        (lambda: RunConfig(output_dir="runs/a"), r"Here it's RunConfig\(run_folder='runs/a'\)"),
        (lambda: RunConfig(gradient_accumulation_steps=4), r"Here it's RunConfig\(num_microbatches=4\)"),
        (lambda: RunConfig(bf16=True), r"Here it's RunConfig\(precision='bfloat16'\)"),
        (lambda: RunConfig(callbacks=[]), r"RunConfig has no 'callbacks'\. It has name, budget, seed"),
    ],
)
def test_another_tools_name_of_a_setting_is_told_ours(made: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        made()


@pytest.mark.parametrize("kind", [RunConfig, Cosine, SGD, Polynomial])
def test_each_name_that_an_error_gives_is_a_setting(kind: Any) -> None:
    """Of one class at least: schedules share a table."""
    known = {field.name for one in (kind, Step, CosineWarmRestarts) for field in dataclasses.fields(one)}
    assert kind.other_names
    assert {here.partition("=")[0] for here in kind.other_names.values()} <= known


def test_a_budget_without_a_unit_is_told_both() -> None:
    with pytest.raises(PlanError, match=r"3 has no unit.*'3ba' for steps, '3ep' for epochs"):
        RunConfig(budget=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "here"), [("bf16-mixed", "bfloat16"), (32, "float32"), ("amp_bf16", "bfloat16")])
def test_other_tools_precisions(given: Any, here: str) -> None:
    with pytest.raises(PlanError, match=f"Here the nearest is '{here}'"):
        RunConfig(precision=given)
    with pytest.raises(PlanError, match="Use 'float32' or 'bfloat16'"):
        RunConfig(precision="float8")  # type: ignore[arg-type]


def test_a_string_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained(config=RunConfig(budget="2ep", run_folder="runs/a"))
    assert (tmp_path / "runs" / "a" / "run.json").is_file()


def with_scheduler() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)


def test_a_scheduler_among_the_optimizers() -> None:
    model, optimizer, scheduler = with_scheduler()
    with pytest.raises(
        PlanError, match=r"Write Cosine\(t_max='6ba', final=0\).*as the schedule= of cosmati\.optim\.SGD"
    ):
        Trainer(model, Classification(3), InMemory(ROWS, 8), optimizers=[optimizer, scheduler])  # type: ignore[list-item]


def test_a_scheduler_that_nobody_would_step() -> None:
    class Steps(Observer):
        def on_step(self, outcome: object) -> None:
            scheduler.step()

    model, optimizer, scheduler = with_scheduler()
    config = RunConfig(budget="6ba", progress=False)
    trainer = Trainer(
        model, Classification(3), InMemory(ROWS, 8), optimizers=optimizer, config=config, observers=[History()]
    )
    with pytest.warns(UserWarning, match=r"bound to the SGD, and fit\(\) doesn't step it"):
        trainer.fit()
    model, optimizer, scheduler = with_scheduler()
    Trainer(model, Classification(3), InMemory(ROWS, 8), optimizers=optimizer, config=config, observers=[Steps()]).fit()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"callbacks": []}, r"Trainer has no 'callbacks'\. Here it's Trainer\(observers=\[\.\.\.\]\)"),
        ({"algorithms": []}, r"Here it's Trainer\(methods=\[\.\.\.\]\)"),
        ({"max_epochs": 3}, r"Here it's Trainer\(config=RunConfig\(budget='3ep'\)\)"),
        ({"max_duration": "3ep"}, r"Here it's Trainer\(config=RunConfig\(budget='3ep'\)\)"),
        ({"seed": 4}, r"Here it's Trainer\(config=RunConfig\(seed=4\)\)"),
        ({"run_folder": "runs/a"}, r"Here it's Trainer\(config=RunConfig\(run_folder='runs/a'\)\)"),
        ({"evaluations": {}}, r"Here it's Trainer\(evaluation=\{\}\)"),
        ({"zzz": 1}, r"Trainer has no 'zzz'\. It has model, loss, data, optimizers, methods, policy"),
    ],
)
def test_another_trainers_arguments_are_told_ours(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Trainer(nn.Linear(4, 3), Classification(3), InMemory(ROWS, 8), optimizers=SGD(lr=0.1), **given)


def test_a_trainer_of_the_users_own_may_take_what_it_likes() -> None:
    class Own(Trainer):
        def __init__(self, *given: Any, callbacks: object = None, **more: Any) -> None:
            super().__init__(*given, **more)
            self.callbacks = callbacks

    own = Own(nn.Linear(4, 3), Classification(3), InMemory(ROWS, 8), optimizers=SGD(lr=0.1), callbacks=3)
    assert own.callbacks == 3


def test_what_is_told_of_a_trainers_arguments_is_there() -> None:
    arguments = set(inspect.signature(Trainer.__init__).parameters)
    assert {here.partition("=")[0] for here in Trainer.other_names.values()} <= arguments
    assert not arguments & set(Trainer.other_names)


def test_early_stopping_by_other_names() -> None:
    with pytest.raises(
        TypeError, match=r"EarlyStopping has no 'monitor'\. Here it's EarlyStopping\(metric='val_acc'\)"
    ):
        EarlyStopping(monitor="val_acc", mode="max")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"higher_is_better=\.\.\. in place of 'max'"):
        EarlyStopping("val_acc", mode="max")  # type: ignore[call-arg]
