"""Several evaluations by name, and evaluations of the first batches: from the trainer to whatever reads metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cosmati import Classification, Evaluation, InMemory, RunConfig, Stateful, Trainer, accuracy, batches
from cosmati.core.loss import Loss
from cosmati.errors import DataError, PlanError
from cosmati.explorer.report import render_report
from cosmati.explorer.run_view import read_run
from cosmati.methods import EMA
from cosmati.optim import SGD
from cosmati.store.reading import read_source
from cosmati.store.scan import StoreEntry
from cosmati.study.measured import measure
from cosmati.train.named_evaluations import held_batches
from cosmati.train.observers import EarlyStopping

ROWS = (torch.arange(96.0).reshape(24, 4).sin(), torch.arange(24) % 3)
OTHERS = (torch.arange(120.0).reshape(30, 4).cos(), torch.arange(30) % 3)


def mean_logit(model: nn.Module, data: Any) -> Loss:
    return Loss(model(data[0]).mean(1).sum(), float(len(data[0])))


def trainer(evaluation: Any, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    observers = changes.pop("observers", ())
    config = RunConfig(**{"budget": "2ep", "evaluate_every": "1ep", **changes})
    return Trainer(
        nn.Linear(4, 3), Classification(3), InMemory(ROWS, 8), optimizers=SGD(lr=0.1), methods=EMA(half_life="2ba"),
        evaluation=evaluation, observers=observers, config=config,
    )  # fmt: skip


def both() -> dict[str, Evaluation]:
    return {
        "validation": Evaluation(batches(ROWS, 8), [accuracy, mean_logit]),
        "test": Evaluation(batches(OTHERS, 8), accuracy),
    }


def test_each_metric_is_called_by_its_evaluation_and_has_its_value() -> None:
    alone = {name: dict(trainer(one).fit().metrics) for name, one in both().items()}
    found = dict(trainer(both()).fit().metrics)
    expected = {f"{name}/{metric}": value for name, metrics in alone.items() for metric, value in metrics.items()}
    assert found == expected
    assert list(found) == ["validation/accuracy", "validation/mean_logit", "test/accuracy"]


def test_one_with_a_name_has_it_and_none_measures_nothing() -> None:
    assert list(trainer({"test": both()["test"]}).fit().metrics) == ["test/accuracy"]
    assert dict(trainer({}).fit().metrics) == {}


def test_a_stateful_metric_of_several_values_is_named_once_more() -> None:
    class Two:
        def reset(self) -> None:
            self.rows = 0

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            self.rows += len(target)

        def compute(self) -> dict[str, int]:
            return {"a": self.rows, "b": 2 * self.rows}

    found = trainer({"test": Evaluation(batches(OTHERS, 8), {"count": Stateful(Two())})}).fit().metrics
    assert found == {"test/count/a": 30, "test/count/b": 60}


@pytest.mark.long
def test_they_are_recorded_read_and_shown(tmp_path: Path) -> None:
    run = trainer(both(), run_folder=tmp_path / "run")
    metrics = dict(run.fit().metrics)
    lines = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert {name: lines[-1][name] for name in metrics} == metrics
    (summary,) = read_source(tmp_path, StoreEntry("run", "run", "")).runs
    assert dict(summary.metrics) == metrics
    assert (summary.quality_name, summary.higher_is_better) == ("validation/accuracy", True)
    page = render_report(title="run", run=read_run(tmp_path / "run"))
    assert "validation/mean_logit" in page
    assert "test/accuracy" in page


def test_early_stopping_watches_one_of_them(tmp_path: Path) -> None:
    stop = EarlyStopping("test/accuracy", higher_is_better=True, patience=1, min_delta=1.0)
    result = trainer(both(), budget="20ep", observers=[stop]).fit()
    assert result.outcome == "stopped"
    assert "test/accuracy" in result.reason
    stop = EarlyStopping("accuracy", higher_is_better=True)
    with pytest.raises(PlanError, match="validation/accuracy"):
        trainer(both(), budget="20ep", observers=[stop]).fit()


def test_a_study_asks_for_one_of_them_and_knows_its_rows() -> None:
    measured = measure("arm", lambda: trainer(both()), "test/accuracy", inference=True)
    alone = measure("arm", lambda: trainer(both()["test"]), "accuracy")
    other = measure("arm", lambda: trainer(both()["validation"]), "accuracy")
    assert measured.points[-1].quality == alone.points[-1].quality
    assert measured.evaluated_on == alone.evaluated_on != other.evaluated_on
    assert measured.evaluated_rows == len(ROWS[0]) + len(OTHERS[0])


def test_an_export_measures_them_again(tmp_path: Path) -> None:
    run = trainer(both(), run_folder=tmp_path / "run")
    metrics = dict(run.fit().metrics)
    run.export(tmp_path / "model", to="safetensors")
    noted = json.loads((tmp_path / "run" / "exports.jsonl").read_text().splitlines()[-1])
    assert noted["metrics"] == pytest.approx(metrics, abs=1e-5)
    assert "test/accuracy" in (tmp_path / "model" / "README.md").read_text()


def test_it_is_found_before_the_first_step_what_one_of_them_lacks() -> None:
    given = both() | {"test": Evaluation([(OTHERS[0][:, :2], OTHERS[1])], accuracy)}
    run = trainer(given)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run.fit()
    assert run.clock.step == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([Evaluation([ROWS], accuracy)] * 2, r"2 evaluations have no names\. Give evaluation=\{'validation': \.\.\."),
        ({"a/b": Evaluation([ROWS], accuracy)}, r"'a/b'.*Give a name without a slash"),
        ({"": Evaluation([ROWS], accuracy)}, "Give a name"),
        ({3: Evaluation([ROWS], accuracy)}, "Give a name"),
        ({"test": [ROWS]}, r"evaluation\['test'\] is a list\. Give Evaluation\(data, metrics\)"),
        (DataLoader(TensorDataset(*ROWS)), r"evaluation is a DataLoader.*Give Evaluation\(data, accuracy\)"),
        (accuracy, r"evaluation is a function.*Give Evaluation\(data, accuracy\)"),
    ],
)
def test_what_is_no_evaluation_is_told_what_is(given: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        trainer(given)


def test_the_first_batches_are_measured_alone() -> None:
    part = Evaluation(batches(OTHERS, 8), [accuracy, mean_logit], num_batches=2)
    same = Evaluation(batches(OTHERS, 8)[:2], [accuracy, mean_logit])
    whole = Evaluation(batches(OTHERS, 8), [accuracy, mean_logit])
    found = [dict(trainer(one).fit().metrics) for one in (part, same, whole)]
    assert found[0] == found[1] != found[2]
    loader = Evaluation(DataLoader(TensorDataset(*OTHERS), 8), [accuracy, mean_logit], num_batches=2)
    assert dict(trainer(loader).fit().metrics) == found[0]
    assert (
        dict(trainer(Evaluation(batches(OTHERS, 8), [accuracy, mean_logit], num_batches=99)).fit().metrics) == found[2]
    )
    measured = measure("arm", lambda: trainer(part), "accuracy", inference=True)
    assert measured.evaluated_rows == 16
    assert measured.evaluated_on == measure("arm", lambda: trainer(same), "accuracy").evaluated_on


@pytest.mark.parametrize("num_batches", [0, -1, 0.25, "all"])
def test_what_is_no_number_of_batches(num_batches: Any) -> None:
    with pytest.raises(DataError, match="Give 1 or more; None takes all"):
        Evaluation([ROWS], accuracy, num_batches=num_batches)


def test_another_tools_name_of_it() -> None:
    with pytest.raises(TypeError, match=r"Here it's Evaluation\(num_batches=2\)"):
        Evaluation([ROWS], accuracy, subset_num_batches=2)  # type: ignore[call-arg]


def test_the_first_batches_of_a_shuffled_loader_are_refused() -> None:
    loader = DataLoader(TensorDataset(*ROWS), 8, shuffle=True)
    with pytest.raises(DataError, match=r"others each time.*shuffle=False"):
        Evaluation(loader, accuracy, num_batches=1)
    Evaluation(loader, accuracy)


def test_batches_are_held_where_an_evaluation_has_them_in_a_list() -> None:
    """Of the metric's own evaluation, as many as it reads."""
    first, second = [torch.zeros(1), torch.ones(1)], [torch.full((1,), 2.0), torch.full((1,), 3.0)]
    count = {"count": lambda model, data: torch.ones(())}
    named = {"one": Evaluation(first, count), "two": Evaluation(second, count, num_batches=1)}
    named["drawn"] = Evaluation(DataLoader(TensorDataset(torch.zeros(4)), 2), count)
    assert held_batches(named, "one/count") == first
    assert held_batches(named, "two/count") == second[:1]
    assert held_batches(named, "drawn/count") == ()
    assert held_batches(named, "three/count") == ()
    assert held_batches(named["one"], "count") == first
    assert held_batches(None, "count") == ()
