"""A run that was stopped goes on as itself: with one thing changed it's refused by name, or the change is on record."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati import InMemory, RunConfig, Trainer
from cosmati.core.clock import Clock
from cosmati.errors import CheckpointError
from cosmati.methods.ema import EMA
from cosmati.methods.label_smoothing import LabelSmoothing
from cosmati.optim import SGD, AdamW
from cosmati.optim.schedules import Constant, Cosine, Linear
from cosmati.records.run import RunRecord
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

GENERATOR = torch.Generator().manual_seed(0)
INPUT, TARGET = torch.randn(48, 6, generator=GENERATOR), torch.randint(3, (48,), generator=GENERATOR)
CLASS_IDS = torch.arange(48) % 2


class StopAt(Observer):
    """Asks the trainer to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step, self.trainer = step, None

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self.step and self.trainer is not None:
            self.trainer.stop()


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def make_model(activation: nn.Module | None = None, width: int = 8, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), activation or nn.ReLU(), nn.Linear(width, 3), nn.Dropout(dropout))


class Scaled(nn.Module):
    """A model whose forward has a number in its code."""

    def __init__(self, by: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 3)
        self.by = (by,)

    def forward(self, rows: Tensor) -> Tensor:
        return self.by[0](self.layer(rows))


def recipe(folder: Path, **changed: Any) -> tuple[Trainer, StopAt]:
    given: dict[str, Any] = {
        "model": make_model,
        "loss": loss,
        "data": (INPUT, TARGET),
        "class_ids": None,
        "class_names": ("all",),
        "rows_per_step": 8,
        "optimizers": [AdamW(lr=0.01, schedule=Constant())],
        "methods": [],
        "config": {},
        "stop_at": 3,
    }
    assert changed.keys() <= given.keys()
    given |= changed
    config = {"budget": "6ba", "run_folder": folder, "num_threads": 1, "num_microbatches": 2, "seed": 3}
    source = InMemory(
        given["data"], given["rows_per_step"], class_ids=given["class_ids"], class_names=given["class_names"]
    )
    stop = StopAt(given["stop_at"])
    stop.trainer = Trainer(
        given["model"](),
        given["loss"],
        source,
        optimizers=given["optimizers"],
        methods=given["methods"],
        observers=[stop],
        config=RunConfig(**config | given["config"]),
    )
    return stop.trainer, stop


def other_rows() -> tuple[Tensor, Tensor]:
    changed = INPUT.clone()
    changed[40, 2] += 1e-3
    return changed, TARGET


def smoothed(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1], label_smoothing=0.1)


REFUSED: dict[str, dict[str, Any]] = {
    "other content": {"data": other_rows()},
    "fewer rows": {"data": (INPUT[:40], TARGET[:40])},
    "other rows a step": {"rows_per_step": 16},
    "a class name": {"class_names": ("every",)},
    "relabelled classes": {"class_ids": CLASS_IDS, "class_names": ("a", "b")},
    "another loss": {"loss": smoothed},
    "a loss of another size": {"loss": lambda model, data: 2 * loss(model, data)},
    "an activation": {"model": lambda: make_model(nn.GELU())},
    "a wider layer": {"model": lambda: make_model(width=9)},
    "another dropout": {"model": lambda: make_model(dropout=0.2)},
    "a model in eval mode": {"model": lambda: make_model().eval()},
    "a frozen layer": {"model": lambda: _frozen(make_model())},
    "learning rate": {"optimizers": [AdamW(lr=0.02, schedule=Constant())]},
    "weight decay": {"optimizers": [AdamW(lr=0.01, weight_decay=0.5, schedule=Constant())]},
    "another optimizer": {"optimizers": [SGD(lr=0.01, schedule=Constant())]},
    "a schedule": {"optimizers": [AdamW(lr=0.01, schedule=Cosine())]},
    "a method more": {"methods": [LabelSmoothing(smoothing=0.1)]},
    "an average more": {"methods": [EMA(half_life="2ba")]},
    "seed": {"config": {"seed": 4}},
    "V": {"config": {"num_microbatches": 4}},
    "precision": {"config": {"precision": "bfloat16"}},
    "deterministic": {"config": {"deterministic": False}},
    "a longer budget": {"config": {"budget": "8ba"}},
    "a shorter budget, asked for, that is over": {"config": {"budget": "2ba", "change": ("budget",)}},
}
NAMED = {
    "other content": "data: digest",
    "fewer rows": "data: digest",
    "other rows a step": "data: rows a step 16, was 8",
    "a class name": "data classes: 0 every, was all",
    "relabelled classes": "data classes",
    "another loss": "loss 0: is .*smoothed, was .*loss",
    "a loss of another size": "loss 0: is .*lambda",
    "an activation": r"model modules: 1 GELU.*was ReLU",
    "a wider layer": r"model parameters 0: weight float32\[9, 6\], was float32\[8, 6\]",
    "another dropout": r"Dropout\(p=0.2.*was Dropout\(p=0.1",
    "a model in eval mode": "in eval mode",
    "a frozen layer": "frozen",
    "learning rate": "learning rate 0.02, was 0.01",
    "weight decay": "weight_decay 0.5, was",
    "another optimizer": "optimizers 0: is SGD, was AdamW",
    "a schedule": "optimizers 0: schedule .*Cosine.*change=.*schedule",
    "a method more": r"methods: 0 LabelSmoothing.*, was absent",
    "an average more": r"methods: 0 EMA",
    "seed": "settings: seed 4, was 3",
    "V": "settings: V 4, was 2",
    "precision": "settings: precision bfloat16, was float32",
    "deterministic": "settings: deterministic False, was True",
    "a longer budget": "budget: span 8ba, was 6ba.*change=.*budget",
    "a shorter budget, asked for, that is over": "over after the 3 steps",
}


def _frozen(model: nn.Module) -> nn.Module:
    model[0].requires_grad_(requires_grad=False)
    return model


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("stopped") / "run"
    trainer, _ = recipe(folder)
    assert trainer.fit().outcome == "stopped"
    return folder


@pytest.fixture
def copied(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.mark.filterwarnings("ignore:.*in evaluation mode:UserWarning")
@pytest.mark.filterwarnings("ignore:The Sequential is in evaluation mode")
@pytest.mark.parametrize("name", REFUSED)
def test_what_fixes_the_bits_is_refused_by_name(copied: Path, name: str) -> None:
    trainer, _ = recipe(copied, **REFUSED[name])
    with pytest.raises(CheckpointError, match=NAMED[name]):
        trainer.fit()
    # Nothing was written: the run itself goes on, to the bits of one that was never stopped.
    trainer, _ = recipe(copied)
    assert trainer.fit().outcome == "completed"


def test_the_same_run_goes_on_to_the_same_bits(copied: Path, tmp_path: Path) -> None:
    trainer, _ = recipe(copied)
    trainer.fit()
    whole, _ = recipe(tmp_path / "whole", stop_at=-1)
    assert whole.fit().outcome == "completed"
    roots = [read_checkpoint(list_checkpoints(f / "checkpoints")[0]).state_digest for f in (copied, tmp_path / "whole")]
    assert roots[0] == roots[1]
    assert not (copied / "changes.jsonl").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"checkpoint_every": "1ba"},
        {"num_checkpoints": 5},
        {"evaluate_every": "1ba"},
        {"details_every": 2},
        {"check_every": 7},
        {"name": "another name"},
        {"max_ranks": 2},
        {"progress": False},
    ],
    ids=str,
)
def test_cadences_are_free_and_on_record(copied: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    trainer, _ = recipe(copied, config=config)
    assert trainer.fit().outcome == "completed"
    whole, _ = recipe(tmp_path / "whole", stop_at=-1)
    whole.fit()
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), whole.model.parameters(), strict=True))
    changes = copied / "changes.jsonl"
    if config.keys() & {"checkpoint_every", "num_checkpoints", "evaluate_every", "details_every", "check_every"}:
        (line,) = map(json.loads, changes.read_text().splitlines())
        name = next(iter(config))
        assert line["step"] == 3
        assert [change[0] for change in line["changes"]] == [f"cadence.{name}"]
        assert line["changes"][0][2] == config[name]
    else:
        assert not changes.exists()


def test_a_longer_budget_by_name(copied: Path, tmp_path: Path) -> None:
    trainer, _ = recipe(copied, config={"budget": "8ba", "change": ("budget",)})
    assert trainer.fit().clock.step == 8
    whole, _ = recipe(tmp_path / "whole", stop_at=-1, config={"budget": "8ba"})
    whole.fit()
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), whole.model.parameters(), strict=True))
    assert json.loads((copied / "changes.jsonl").read_text())["changes"] == [["budget.span", "6ba", "8ba"]]


@pytest.mark.parametrize("schedule", [Cosine(), Linear()])
def test_a_budget_that_would_change_past_rates_is_refused(tmp_path: Path, schedule: Any) -> None:
    given = {"optimizers": [AdamW(lr=0.01, schedule=schedule)]}
    recipe(tmp_path / "run", **given)[0].fit()
    longer = {"budget": "8ba", "change": ("budget",)}
    with pytest.raises(CheckpointError, match="learning rate of step 1 would have been another"):
        recipe(tmp_path / "run", **given, config=longer)[0].fit()
    # With a new schedule by name it goes on, and the rates to come are the new ones.
    trainer, _ = recipe(
        tmp_path / "run",
        optimizers=[AdamW(lr=0.01, schedule=Constant())],
        config=longer | {"change": ("budget", "schedule")},
    )
    assert trainer.fit().clock.step == 8
    assert trainer.assembly.optimizers[0].optimizer.param_groups[0]["lr"] == 0.01


def test_a_budget_is_kept_where_a_method_has_acted_by_it(tmp_path: Path) -> None:
    from cosmati.methods.layer_freezing import LayerFreezing

    given = {"methods": [LayerFreezing(freeze_start=0.1, freeze_level=0.5)]}
    recipe(tmp_path / "run", **given)[0].fit()
    with pytest.raises(CheckpointError, match="a method has acted by how far the run was"):
        recipe(tmp_path / "run", **given, config={"budget": "8ba", "change": ("budget",)})[0].fit()


def test_code_that_no_digest_sees_is_found_by_what_it_computes(tmp_path: Path) -> None:
    recipe(tmp_path / "run", model=lambda: Scaled(lambda x: x * 1.0))[0].fit()
    trainer, _ = recipe(tmp_path / "run", model=lambda: Scaled(lambda x: x * 1.001))
    with pytest.raises(CheckpointError, match="a fixed microbatch has the loss"):
        trainer.fit()
    assert recipe(tmp_path / "run", model=lambda: Scaled(lambda x: x * 1.0))[0].fit().outcome == "completed"


def test_the_probe_keeps_no_content(copied: Path) -> None:
    facts = read_checkpoint(list_checkpoints(copied / "checkpoints")[0]).facts
    assert facts["probe"]["specs"] == [[[4, 6], "float32", 1], [[4], "int64", 2]]
    (value,) = facts["probe"]["losses"]
    assert 0 < float.fromhex(value) < 10


def test_a_run_that_dies_before_its_first_checkpoint_is_still_itself(tmp_path: Path) -> None:
    trainer, _ = recipe(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), trainer:
        raise ZeroDivisionError
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000000"]
    with pytest.raises(CheckpointError, match="settings: seed 9, was 3"):
        recipe(tmp_path / "run", config={"seed": 9})[0].fit()


def test_the_first_root_is_never_computed_again(copied: Path, tmp_path: Path) -> None:
    def drawn() -> nn.Module:
        model = make_model()
        torch.manual_seed(99)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        return model

    before = RunRecord.from_json((copied / "run.json").read_text()).digests["model"]
    trainer, _ = recipe(copied, model=drawn)
    assert trainer.fit().outcome == "completed"
    assert RunRecord.from_json((copied / "run.json").read_text()).digests["model"] == before
    facts = read_checkpoint(list_checkpoints(copied / "checkpoints")[0]).facts
    assert facts["initial_root"] == before


def test_other_threads_withdraw_the_promises(copied: Path) -> None:
    trainer, _ = recipe(copied, config={"num_threads": 2})
    assert trainer.plan.holds("resume")
    trainer.fit()
    for name in ("resume", "elastic"):
        assert not trainer.plan.holds(name)
        assert "threads 2, was 1" in str(trainer.plan)
    record = RunRecord.from_json((copied / "run.json").read_text())
    assert not next(g for g in record.guarantees if g.name == "resume").holds
    # It stays withdrawn.
    again, _ = recipe(copied, config={"budget": "8ba", "change": ("budget",)})
    again.fit()
    assert not again.plan.holds("resume")


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_code_is_compared_by_bits_only_where_the_same_code_has_the_same_bits(
    copied: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    from cosmati.train import facts, probe

    usual = facts.describe_environment
    if is_elsewhere:
        monkeypatch.setattr(facts, "describe_environment", lambda device: usual(device) | {"cpu_capability": "another"})
    # What other kernels would make of the fixed microbatch.
    monkeypatch.setattr(probe.Probe, "losses", lambda *_: ["0x1.0p-3"])
    trainer, _ = recipe(copied)
    if is_elsewhere:
        assert trainer.fit().outcome == "completed"
    else:
        with pytest.raises(CheckpointError, match=r"loss 0\.125, and had"):
            trainer.fit()


@pytest.mark.parametrize("name", ["torch", "device", "cpu_capability", "kernels"])
def test_another_release_or_processor_withdraws_them_too(
    copied: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from cosmati.train import facts as module

    usual = module.describe_environment
    monkeypatch.setattr(module, "describe_environment", lambda device: usual(device) | {name: "another"})
    trainer, _ = recipe(copied)
    trainer.fit()
    assert not trainer.plan.holds("resume")
    assert f"{name} another, was" in str(trainer.plan)


def test_weights_of_another_run(copied: Path, tmp_path: Path) -> None:
    trainer, _ = recipe(tmp_path / "new", config={"load_weights": copied})
    parent = read_checkpoint(list_checkpoints(copied / "checkpoints")[0])
    assert all(torch.equal(v, parent.model[n]) for n, v in trainer.model.state_dict().items())
    trainer.fit()
    first = read_checkpoint(tmp_path / "new" / "checkpoints" / "step-00000003").facts["identity"]
    assert (first["parent.run"], first["parent.step"]) == ("run", 3)
    # A resume reads no other run: the parent may have gone on, or be gone.
    assert recipe(tmp_path / "new")[0].fit().outcome == "completed"
    last = read_checkpoint(list_checkpoints(tmp_path / "new" / "checkpoints")[0]).facts["identity"]
    assert last["parent.root"] == first["parent.root"]


def test_a_checkpoint_of_an_earlier_release_is_refused_by_name(copied: Path) -> None:
    from cosmati.train.run.checkpoints import _digests

    path = list_checkpoints(copied / "checkpoints")[0]
    facts = json.loads((path / "state.json").read_text())
    del facts["version"]
    (path / "state.json").write_text(json.dumps(facts))
    (path / "digests.json").write_text(json.dumps(_digests(path)))
    with pytest.raises(CheckpointError, match="has version 1, and this release resumes version 4"):
        recipe(copied)[0].fit()


@pytest.mark.long
def test_a_damaged_checkpoint_names_the_whole_one(tmp_path: Path) -> None:
    recipe(tmp_path / "run", config={"checkpoint_every": "1ba", "num_checkpoints": 3})[0].fit()
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"damaged.*Step 2 is whole: RunConfig\(resume_from='whole'\)"):
        recipe(tmp_path / "run")[0].fit()
    trainer, _ = recipe(tmp_path / "run", config={"resume_from": "whole"}, stop_at=-1)
    assert trainer.fit().outcome == "completed"
    whole, _ = recipe(tmp_path / "whole", stop_at=-1)
    whole.fit()
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), whole.model.parameters(), strict=True))
    assert (newest.parent / f"damaged-1-{newest.name}").exists()


def test_a_renamed_folder_goes_on(copied: Path) -> None:
    moved = copied.rename(copied.parent / "elsewhere")
    assert recipe(moved)[0].fit().outcome == "completed"


def test_a_clock_goes_on_where_it_stood(copied: Path) -> None:
    facts = read_checkpoint(list_checkpoints(copied / "checkpoints")[0]).facts
    assert Clock(*facts["clock"])[:4] == (3, 0, 3, 24)
    assert dataclasses.asdict(RunConfig())["resume_from"] == "newest"
