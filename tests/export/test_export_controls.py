"""What mustn't leave doesn't, whatever fails on the way; and what does leave, leaves no trace in the run."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from cosmati import Classification, Evaluation, InMemory, Loss, RunConfig, Trainer, accuracy, batches
from cosmati.errors import ExportError, PlanError
from cosmati.export import folding, formats, publishing
from cosmati.export.publishing import note_export
from cosmati.methods import EMA, BlurPool
from cosmati.methods.blurpool import BlurConv2d
from cosmati.optim import SGD
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

pytestmark = pytest.mark.long


def rows() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(32, 1, 9, 9, generator=draws), torch.arange(32) % 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(4, 4, 2, 2),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def trainer_in(folder: Path | None, model: nn.Module | None = None, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "methods": [BlurPool(min_channels=1), EMA(half_life="2ba")],
        "evaluation": Evaluation(batches(rows(), 16), {"accuracy": accuracy}),
        "config": RunConfig(budget="6ba", run_folder=folder),
    }
    return Trainer(
        model or net(), Classification(2), InMemory(rows(), 8), optimizers=[SGD(lr=0.1)], **(given | options)
    )


def refused(trainer: Trainer, folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(ExportError, match=match):
        trainer.export(folder / "out", to="safetensors", **options)
    assert not (folder / "out").exists()
    assert not list(folder.glob(".*"))


def test_folding_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()
    own = folding._blur

    def wrong(*given: Any) -> nn.Conv2d:
        layer = own(*given)
        with torch.no_grad():
            layer.weight.mul_(1 + 1e-6)
        return layer

    monkeypatch.setattr(folding, "_blur", wrong)
    refused(trainer, tmp_path, "outputs differ by")
    assert not (tmp_path / "run/exports.jsonl").exists()


def test_weights_that_do_not_come_back_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()
    own: Callable[..., None] = formats.save_file

    def wrong(tensors: dict[str, Tensor], *given: Any, **options: Any) -> None:
        own({**tensors, "5.bias": tensors["5.bias"] + 1e-6}, *given, **options)

    monkeypatch.setattr(formats, "save_file", wrong)
    refused(trainer, tmp_path, "doesn't give back 5.bias")


def test_a_figure_that_the_export_has_not_is_an_error(tmp_path: Path) -> None:
    def blurred(model: nn.Module, data: Any) -> Loss:
        model(data[0])
        return Loss(torch.tensor(float(any(isinstance(part, BlurConv2d) for part in model.modules()))), 1.0)

    trainer = trainer_in(tmp_path / "run", evaluation=Evaluation(batches(rows(), 16), {"blurred": blurred}))
    assert trainer.fit().metrics == {"blurred": 1.0}
    refused(trainer, tmp_path, "recorded 1, exported 0, the run's own model here 1.*the export that differs")
    trainer.export(tmp_path / "out", to="safetensors", fold=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "model.safetensors", "rebuild.py"}
    rebuilt = runpy.run_path(str(tmp_path / "out/rebuild.py"))["rebuild"](net())
    assert load_model(rebuilt, tmp_path / "out/model.safetensors") == (set(), [])
    with trainer.averaged() as measured, torch.no_grad():
        assert torch.equal(rebuilt.eval()(rows()[0]), measured.eval()(rows()[0]))


def test_a_metric_of_other_rows_is_told_from_a_wrong_export(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()
    trainer._metrics = {"accuracy": 0.123}
    refused(trainer, tmp_path, "gives another value here too")


def test_a_failed_end_leaves_a_note_and_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note comes first: an export that nobody knows of is the worse of the two."""
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publishing, "publish", full)
    refused(trainer, tmp_path, "No space left")
    assert len((tmp_path / "run/exports.jsonl").read_text().splitlines()) == 1


def test_an_export_that_cannot_be_noted_is_not_published(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    trainer.fit()
    (tmp_path / "run/exports.jsonl").mkdir()
    refused(trainer, tmp_path, "can't be noted")


def test_a_torn_line_is_ended_before_the_next(tmp_path: Path) -> None:
    (tmp_path / "exports.jsonl").write_text('{"a": 1}\n{"torn": ')
    note_export(tmp_path, {"b": 2})
    note_export(tmp_path, {"c": 3})
    lines = (tmp_path / "exports.jsonl").read_text().splitlines()
    assert lines[1] == '{"torn": '
    assert [json.loads(lines[index]) for index in (0, 2, 3)] == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_an_export_in_mid_run_changes_nothing(tmp_path: Path) -> None:
    def trained(*, exports: bool) -> dict[str, Tensor]:
        trainer = trainer_in(None)
        with trainer:
            for index in range(6):
                if index == 3 and exports:
                    trainer.export(tmp_path / "out", to="safetensors")
                batch = tuple(part[8 * (index % 4) : 8 * (index % 4) + 8] for part in rows())
                trainer.step(batch)
        return {**trainer.model.state_dict(), **trainer.states[1]}

    first, second = trained(exports=False), trained(exports=True)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    card = (tmp_path / "out/README.md").read_text()
    assert "after 3 steps" in card
    assert "not at this step" in card
    assert "had no checkpoint there" in card


def test_a_figure_of_an_earlier_step_is_not_this_one(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    batch = tuple(part[:8] for part in rows())
    with trainer:
        trainer.step(batch)
        trainer.evaluate()
        trainer.export(tmp_path / "first", to="safetensors")
        trainer.step(batch)
        trainer.export(tmp_path / "second", to="safetensors")
    lines = [json.loads(text) for text in (tmp_path / "run/exports.jsonl").read_text().splitlines()]
    assert [(line["step"], line["checked"]) for line in lines] == [(1, True), (2, False)]
    assert "not at this step" in (tmp_path / "second/README.md").read_text()


def test_a_checkpoint_is_recalled_into_a_trainer_that_has_not_begun(tmp_path: Path) -> None:
    trained = trainer_in(tmp_path / "run")
    trained.fit()
    checkpoint = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    with trainer_in(None) as begun:
        own = {name: value.clone() for name, value in begun.model.state_dict().items()}
        with pytest.raises(PlanError, match=r"recall\(\) would put other weights into an open run. Call it in a new"):
            begun.recall(checkpoint)
        assert all(torch.equal(value, own[name]) for name, value in begun.model.state_dict().items())
    fresh = trainer_in(None)
    fresh.recall(checkpoint)
    assert fresh.clock == trained.clock
    for one, other in zip(fresh.model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_is_refused_where_averages_stand_in(tmp_path: Path) -> None:
    trainer = trainer_in(None)
    with trainer.averaged(), pytest.raises(PlanError, match="Call export"):
        trainer.export(tmp_path / "out")
