"""What a trainer hands to an export: the model that is evaluated, where it's from, and what it's checked with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import ExportError, PlanError
from cosmati.export.publishing import Check, Origin, quiet
from cosmati.methods import EMA
from cosmati.optim import SGD, ScheduleFreeAdamW
from cosmati.optim.schedule_free import ScheduleFree
from cosmati.records.run import RunRecord
from cosmati.train import exporting
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, Stateful
from cosmati.train.exporting import RecordedRun, _first_call, other_model, structure_digest, structure_of
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer

Rows = tuple[Tensor, Tensor]


def squared(model: nn.Module, data: Rows) -> Tensor:
    loss: Tensor = (model(data[0]) - data[1]).square().mean()
    return loss


def level(model: nn.Module, data: Rows) -> Tensor:
    output: Tensor = model(data[0]).float().mean()
    return output


def rows(first: float) -> Rows:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(4, 2, generator=generator) + first, torch.rand(4, 1, generator=generator)


def trainer_of(
    folder: Path | None = None,
    *,
    evaluation: Evaluation | None = None,
    loss: Any = squared,
    data: list[Rows] | None = None,
    **given: Any,
) -> Trainer:
    torch.manual_seed(5)
    config = RunConfig(
        budget=given.pop("budget", "2ba"),
        num_threads=1,
        run_folder=folder,
        precision=given.pop("precision", "float32"),
        **({"checkpoint_every": "1ba"} if folder is not None else {}),
    )
    model = given.pop("model", None) or nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    optimizers = given.pop("optimizers", [SGD(lr=0.1)])
    batches = [rows(0.0), rows(1.0)] if data is None else data
    return Trainer(model, loss, batches, optimizers=optimizers, evaluation=evaluation, config=config, **given)


@dataclasses.dataclass
class Asked:
    """What `export_model` was given."""

    model: nn.Module
    to: str
    out: Path
    origin: Origin
    check: Check
    folds: bool
    say: Any
    weights: dict[str, Tensor]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    found: list[Asked] = []

    def note(model: nn.Module, to: str, out: Path, origin: Origin, check: Check, *, folds: bool, say: Any) -> nn.Module:
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        found.append(Asked(model, to, out, origin, check, folds, say, weights))
        return nn.Identity()

    monkeypatch.setattr(exporting, "export_model", note)
    return found


def alike(one: Any, other: Any) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


# What is handed over.


def test_an_export_is_told_what_it_is_asked_for(asked: list[Asked]) -> None:
    trainer = trainer_of()
    assert isinstance(trainer.export("out"), nn.Identity)
    trainer.export(Path("~") / "out", "safetensors", fold=False, tolerance=0.25)
    first, second = asked
    assert (first.to, first.out, first.folds, first.check.tolerance) == ("torch", Path("out"), True, None)
    assert (second.to, second.out, second.folds) == ("safetensors", Path.home() / "out", False)
    assert second.check.tolerance == 0.25
    assert first.say is second.say is quiet
    assert first.model is trainer.model


def test_a_run_without_a_folder_is_described_as_it_stands(asked: list[Asked]) -> None:
    trainer = trainer_of()
    trainer.fit()
    trainer.export("out")
    origin = asked[0].origin
    assert (origin.record.run_id, origin.record.digests["model"], origin.record.num_steps) == ("", "", 2)
    assert origin.record.digests["data"] == trainer.prepared.data_digest
    assert (origin.folder, origin.checkpoint, origin.step) == (None, None, 2)
    assert (origin.averaged, origin.methods, origin.is_low) == ("", (), False)
    assert origin.structure == structure_digest(trainer.prepared.identity)
    assert [one.name for one in origin.record.guarantees] == [one.name for one in trainer.plan.guarantees]
    assert alike(asked[0].weights, trainer.model.state_dict())
    check = asked[0].check
    assert (check.measure, check.recorded) == (None, None)


def test_a_run_in_a_folder_is_told_with_its_checkpoint_and_the_promises_that_hold_now(
    asked: list[Asked], tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path / "run")
    trainer.fit()
    at_first = RunRecord.from_json((tmp_path / "run" / "run.json").read_text())
    trainer.export("out")
    origin = asked[0].origin
    assert origin.record.run_id == at_first.run_id != ""
    assert (origin.folder, origin.checkpoint) == (tmp_path / "run", "step-00000002")
    assert [(one.name, one.holds, one.because) for one in origin.record.guarantees] == [
        (one.name, one.holds, one.because) for one in trainer.plan.guarantees
    ]
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        path.rename(path.with_name(f"gone-{path.name}"))
    trainer.export("other")
    assert (asked[1].origin.checkpoint, asked[1].origin.folder) == (None, tmp_path / "run")


def test_the_record_of_a_folder_is_taken_at_the_step_of_the_export(asked: list[Asked], tmp_path: Path) -> None:
    with trainer_of(tmp_path / "run") as trainer:
        trainer.step(rows(0.0))
        found = trainer._own_run()
    assert (found.record.num_steps, found.checkpoint, found.folder) == (1, "step-00000001", tmp_path / "run")


def test_a_trainer_that_has_not_begun_its_folder_has_no_run_in_it(asked: list[Asked], tmp_path: Path) -> None:
    trainer_of(tmp_path / "run").export("out")
    assert (asked[0].origin.record.run_id, asked[0].origin.folder, asked[0].origin.checkpoint) == ("", None, None)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_recorded_run_is_told_instead_of_the_trainers_own(asked: list[Asked], tmp_path: Path) -> None:
    trainer = trainer_of()
    own = trainer._own_run()
    for run_id, checkpoint in [("r", "step-7"), ("", "")]:
        record = dataclasses.replace(own.record, run_id=run_id)
        run = RecordedRun(record=record, folder=tmp_path, checkpoint=checkpoint, metrics={"level": 2.0})
        told: list[str] = []
        trainer.export_recorded(run, Path("out"), "torch", say=told.append)
        assert asked[-1].origin.record is record
        assert (asked[-1].folds, asked[-1].check.tolerance) == (True, None)
        assert asked[-1].origin.folder == (tmp_path if run_id else None)
        assert asked[-1].origin.checkpoint == (checkpoint or None)
        assert asked[-1].check.recorded == {"level": 2.0}
        asked[-1].say("so")
        assert told == ["so"]


def test_metrics_count_as_recorded_only_at_their_own_step(asked: list[Asked]) -> None:
    with trainer_of(evaluation=Evaluation([rows(2.0)], {"level": level})) as trainer:
        metrics = dict(trainer.evaluate())
        assert trainer._own_run().metrics == metrics != {}
        trainer.export("out")
        trainer.step(rows(0.0))
        assert trainer._own_run().metrics is None
    assert asked[0].check.recorded == metrics


def test_low_precision_is_told(asked: list[Asked]) -> None:
    trainer_of(precision="bfloat16", evaluation=Evaluation([rows(2.0)], {"level": level})).export("out")
    assert asked[0].origin.is_low
    assert asked[0].check.where == "the run's data to evaluate on, under autocast in bfloat16"


def test_an_export_within_averages_is_refused() -> None:
    trainer = trainer_of()
    with trainer.averaged(), pytest.raises(PlanError, match=r"export\(\) within averaged\(\)"):
        trainer.export("out")


def test_a_model_that_ranks_hold_in_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    monkeypatch.setattr(trainer.assembly.ranks, "in_lockstep", True)
    with pytest.raises(ExportError, match=r"each holds a part under sharding='full'.*one process: cosmati export"):
        trainer.export("out")


def test_a_rank_that_is_not_the_first_gets_a_copy_to_evaluate(
    asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of()
    monkeypatch.setattr(trainer.assembly.ranks, "rank", 1)
    copied = trainer.export("out")
    assert asked == []
    assert copied is not trainer.model
    assert not copied.training
    assert trainer.model.training
    assert alike(copied.state_dict(), trainer.model.state_dict())


# Averages.


def test_the_weights_of_a_method_that_averages_are_handed_over_under_its_name(asked: list[Asked]) -> None:
    trainer = trainer_of(methods=[EMA(half_life="1ba")])
    trainer.fit()
    latest = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with trainer.averaged() as model:
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.export("out")
    assert asked[0].origin.averaged == "EMA(half_life='1ba')"
    assert asked[0].origin.methods == trainer.assembly.plan.methods
    assert alike(asked[0].weights, expected)
    assert not alike(expected, latest)
    assert alike(trainer.model.state_dict(), latest)


def test_an_average_before_the_first_step_is_no_average() -> None:
    trainer = trainer_of(methods=[EMA(half_life="1ba")])
    method, state = trainer.assembly.plan.methods[0], trainer.methods.states[0]
    is_there = method.evaluation_weights(state, trainer.position()) is not None
    assert trainer._whose_average() == ("EMA(half_life='1ba')" if is_there else "")


def test_an_optimizer_that_averages_is_named() -> None:
    trainer = trainer_of(optimizers=[ScheduleFreeAdamW(lr=0.1)])
    trainer.fit()
    assert trainer._whose_average() == "ScheduleFree"


def test_only_optimizers_with_an_average_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    own = [ScheduleFree(layer.parameters(), lr=0.1) for layer in model[:2]]
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)
    trainer = trainer_of(model=model, optimizers=[*own, other])
    trainer.fit()
    assert trainer._whose_average() == "ScheduleFree, ScheduleFree"


# What it's checked with.


def test_a_check_measures_as_an_evaluation_does_and_leaves_the_model_alone(asked: list[Asked]) -> None:
    with trainer_of(evaluation=Evaluation([rows(2.0), rows(3.0)], {"level": level})) as trainer:
        trainer.export("out")
        check = asked[0].check
        assert check.measure is not None
        before, drawn = trainer.model.training, torch.get_rng_state()
        found = check.measure(trainer.model)
        assert found == trainer.evaluate() != {}
        assert trainer.model.training == before
        assert torch.equal(torch.get_rng_state(), drawn)


class Counting(nn.Module):
    """Counts its calls, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        self.seen += 1
        output: Tensor = self.linear(x) * scale + torch.rand(()) * 0
        return output


def test_measuring_puts_back_what_the_model_holds_and_the_numbers_drawn(asked: list[Asked]) -> None:
    model = Counting()
    trainer = trainer_of(model=model, evaluation=Evaluation([rows(2.0)], {"level": level}))
    calls, seen = model.calls, float(model.seen)
    drawn = torch.get_rng_state()
    trainer._measure(model)
    assert (model.calls, float(model.seen)) == (calls, seen)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_the_first_call_of_an_evaluation_is_the_example() -> None:
    def scaled(model: nn.Module, data: Rows) -> Tensor:
        output: Tensor = model(data[0], scale=2.0).mean()
        return output

    model = Counting()
    evaluation = Evaluation([rows(2.0), rows(3.0)], {"scaled": scaled, "level": level})
    trainer = trainer_of(model=model, evaluation=evaluation)
    inputs, where = trainer._example(model)
    assert where == "the run's data to evaluate on"
    assert inputs is not None
    assert torch.equal(inputs[0][0], rows(2.0)[0])
    assert inputs[1] == {"scale": 2.0}
    assert model.calls == 0
    assert not model._forward_pre_hooks


class Whole:
    """A metric that is computed of all batches together."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum = 0.0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.sum += float(output.sum())

    def compute(self) -> float:
        return self.sum


def test_metrics_of_all_batches_together_give_an_example_too() -> None:
    model = Counting()
    trainer = trainer_of(model=model, evaluation=Evaluation([rows(2.0), rows(3.0)], {"whole": Stateful(Whole())}))
    inputs, where = trainer._example(model)
    assert where == "the run's data to evaluate on"
    assert inputs is not None
    assert torch.equal(inputs[0][0], rows(2.0)[0])


def test_an_evaluation_that_never_runs_the_model_gives_no_example() -> None:
    def none(model: nn.Module, data: Rows) -> Tensor:
        return data[0].mean()

    trainer = trainer_of(evaluation=Evaluation([rows(2.0)], {"none": none}))
    assert trainer._example(trainer.model) == (None, "the run's data to evaluate on")


def test_without_an_evaluation_the_first_rows_of_training_are_the_example() -> None:
    def loss(model: nn.Module, data: Rows) -> Tensor:
        output: Tensor = model(data[0], scale=1.0 + 10 * model.training + 100 * torch.is_grad_enabled())
        return (output - data[1]).square().mean()

    model = Counting()
    trainer = trainer_of(model=model, loss=loss)
    model.linear.eval()
    calls, drawn = model.calls, torch.get_rng_state()
    inputs, where = trainer._example(model)
    assert where == ""
    assert inputs is not None
    assert torch.equal(inputs[0][0], rows(0.0)[0])
    assert inputs[1] == {"scale": 1.0}
    assert (model.training, model.linear.training) == (True, False)
    assert model.calls == calls
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_loss_that_cannot_be_evaluated_gives_no_example() -> None:
    def loss(model: nn.Module, data: Rows) -> Tensor:
        output = squared(model, data)
        if not model.training:
            raise RuntimeError("only in training")
        return output

    trainer = trainer_of(loss=loss)
    assert trainer._example(trainer.model) == (None, "")
    assert trainer.model.training


def test_rows_that_are_given_by_hand_are_no_example() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    config = RunConfig(budget="2ba", num_threads=1)
    trainer = Trainer(model, squared, optimizers=[SGD(lr=0.1)], config=config)
    assert trainer._example(model) == (None, "")


def test_a_first_call_is_copied_as_it_was_and_before_other_hooks() -> None:
    model, given = nn.Linear(2, 1), torch.ones(1, 2)
    other = model.register_forward_pre_hook(lambda _, args: (args[0] + 5,))
    with _first_call(model) as seen:
        assert seen == []
        model(given)
        given.fill_(9.0)
        model(torch.zeros(1, 2))
    assert len(seen) == 1
    assert torch.equal(seen[0][0][0], torch.ones(1, 2))
    other.remove()
    assert not model._forward_pre_hooks
    with pytest.raises(KeyError), _first_call(model):
        raise KeyError
    assert not model._forward_pre_hooks


# Recalled checkpoints.


def test_a_recalled_checkpoint_brings_weights_clock_and_averages(tmp_path: Path) -> None:
    first = trainer_of(tmp_path / "run", methods=[EMA(half_life="1ba")])
    first.fit()
    checkpoint = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    second = trainer_of(methods=[EMA(half_life="1ba")])
    second.recall(checkpoint)
    assert second.clock.step == 2
    assert alike(second.model.state_dict(), first.model.state_dict())
    with first.averaged() as one, second.averaged() as other:
        assert alike(one.state_dict(), other.state_dict())
    assert second._opened is None


def test_an_open_run_recalls_nothing(tmp_path: Path) -> None:
    trainer_of(tmp_path / "run").fit()
    checkpoint = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    with trainer_of() as trainer:
        trainer.step(rows(0.0))
        with pytest.raises(PlanError, match=r"recall\(\) would put other weights into an open run"):
            trainer.recall(checkpoint)


def test_another_loss_of_a_checkpoints_fixed_microbatch_is_told_with_both_figures(tmp_path: Path) -> None:
    def twice(model: nn.Module, data: Rows) -> Tensor:
        return 2 * squared(model, data)

    trainer_of(tmp_path / "run").fit()
    checkpoint = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    kept = checkpoint.facts["probe"]
    same, other = trainer_of(), trainer_of(loss=twice)
    for trainer in (same, other):
        trainer.recall(checkpoint)
    assert same.other_code(checkpoint) == ""
    was = float.fromhex(kept["losses"][0])
    assert other.other_code(checkpoint) == f"{2 * was:.6g} here, and {was:.6g} in the run"

    def with_losses(*losses: str | None) -> Any:
        return dataclasses.replace(checkpoint, facts={**checkpoint.facts, "probe": {**kept, "losses": list(losses)}})

    short = trainer_of(loss=twice, data=[rows(0.0)])
    short.recall(checkpoint)
    assert "here, and" in short.other_code(checkpoint)

    # What couldn't be compared then is nothing now, and a figure within rounding is the same.
    assert other.other_code(with_losses()) == ""
    assert other.other_code(with_losses(None)) == ""
    assert same.other_code(with_losses((was * (1 + 4e-6)).hex())) == ""
    near = was * 1.01
    assert same.other_code(with_losses(near.hex(), near.hex())) == f"{was:.6g} here, and {near:.6g} in the run"
    low = trainer_of(precision="bfloat16")
    low.recall(checkpoint)
    assert low.other_code(with_losses(near.hex())) == ""
    assert "here, and" in low.other_code(with_losses((was * 1.1).hex()))


def test_a_trainer_without_rows_compares_no_code(tmp_path: Path) -> None:
    trainer_of(tmp_path / "run").fit()
    checkpoint = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])

    def twice(model: nn.Module, data: Rows) -> Tensor:
        return 2 * squared(model, data)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    config = RunConfig(budget="2ba", num_threads=1)
    trainer = Trainer(model, twice, optimizers=[SGD(lr=0.1)], config=config)
    trainer.recall(checkpoint)
    assert trainer.other_code(checkpoint) == ""


# A model's structure.

FACTS = {
    "model.layers": ["Linear"],
    "model.class": "a.file_ab12.Net of (__main__.Net, __mp_main__.Net)",
    "model.contents.table": "ab",
    "methods.0": "EMA",
    "method_options.0": "1ba",
    "models": "m",
    "settings.seed": 1,
    "data.digest": "d",
}


def test_a_structure_is_what_says_what_the_model_is_wherever_its_file_ran() -> None:
    expected = {
        "model.layers": ["Linear"],
        "model.class": "a.Net of (Net, Net)",
        "methods.0": "EMA",
        "method_options.0": "1ba",
    }
    assert structure_of(FACTS) == expected
    assert structure_digest(FACTS) == hashlib.sha256(json.dumps(expected, sort_keys=True).encode()).hexdigest()


def differing(was: dict[str, Any], now: dict[str, Any], *, is_elsewhere: bool = False) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.was, one.now) for one in other_model(was, now, is_elsewhere=is_elsewhere)]


def test_another_model_is_told_by_its_facts_and_those_that_statistics_follow_from() -> None:
    told = (
        *("settings.seed", "settings.num_microbatches", "settings.precision"),
        *("data.digest", "data.content", "policy", "model.x", "methods.1", "method_options.1"),
    )
    for name in told:
        assert differing({name: "1"}, {name: "2"}) == [(name, "1", "2")]
        assert differing({name: "1"}, {name: "1"}) == []
        assert differing({}, {name: "2"}) == [(name, None, "2")]
    for name in ("settings.lr", "data.name", "settings.seeds", "optimizers.0"):
        assert differing({name: "1"}, {name: "2"}) == []


def test_tables_may_be_other_bits_elsewhere() -> None:
    was, now = {"model.contents.t": "1", "model.x": "1"}, {"model.contents.t": "2", "model.x": "2"}
    assert [name for name, *_ in differing(was, now)] == ["model.contents.t", "model.x"]
    assert [name for name, *_ in differing(was, now, is_elsewhere=True)] == ["model.x"]


def test_code_of_another_python_is_no_other_model() -> None:
    was, now = {"model.f.code": "ab of Python 3.12"}, {"model.f.code": "cd of Python 3.13"}
    assert differing(was, now) == []
    assert differing(was, {"model.f.code": "cd of Python 3.12"}) != []


def test_a_file_that_ran_as_a_script_is_the_same_when_it_is_a_recipe() -> None:
    assert differing({"model.class": "__main__.Net"}, {"model.class": "file_ab.Net"}) == []
    assert differing({"model.class": "__main__.Net"}, {"model.class": "file_ab.Other"}) != []
    assert differing({"model.class": "other.Net"}, {"model.class": "file_ab.Net"}) != []
