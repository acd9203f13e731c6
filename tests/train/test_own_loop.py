"""A loop of the user's own: the same cadences as in `fit`, its own signals, and a process that is left as it was."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati import Evaluation, InMemory, RunConfig, SubStep, Trainer
from cosmati.errors import CheckpointError, PlanError
from cosmati.optim import AdamW
from cosmati.records.run import RunRecord
from cosmati.train.evaluation import accuracy
from cosmati.train.observers.observer import History
from cosmati.train.run import session
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.processes import PythonProcess
from tests.train.hand_made import Ticks

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(40, 4, generator=GENERATOR), torch.randint(3, (40,), generator=GENERATOR)


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


class Tied(nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("view", self.embedding.weight.detach()[:2])

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def make(folder: Path | None = None, model: nn.Module | None = None, data: Any = None, **given: Any) -> Trainer:
    torch.manual_seed(0)
    config = {"budget": "6ba", "num_threads": 1, "run_folder": folder} | given.pop("config", {})
    return Trainer(
        nn.Linear(4, 3) if model is None else model,
        given.pop("loss", loss),
        data,
        optimizers=[AdamW(lr=0.01)],
        config=RunConfig(**config),
        **given,
    )


def steps() -> list[tuple[Tensor, Tensor]]:
    return [(ROWS[0][i : i + 8], ROWS[1][i : i + 8]) for i in range(0, 40, 8)]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_same_cadences_as_in_fit(tmp_path: Path, num_microbatches: int) -> None:
    config = {
        "checkpoint_every": "2ba",
        "evaluate_every": "3ba",
        "num_checkpoints": 9,
        "num_microbatches": num_microbatches,
    }
    found = []
    for name in ("own", "fit"):
        history = History()
        evaluation = Evaluation(steps(), {"accuracy": accuracy})
        data = steps() if name == "fit" else None
        trainer = make(tmp_path / name, data=data, evaluation=evaluation, observers=[history], config=config)
        if name == "fit":
            trainer.fit()
        else:
            with trainer:
                while not trainer.should_stop:
                    trainer.step(steps()[trainer.clock.step % 5])
                trainer.evaluate()
        weights = read_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[0]).model
        evaluations = [(clock.step, metrics) for clock, _, metrics in history.evaluations]
        names = [path.name for path in list_checkpoints(tmp_path / name / "checkpoints")]
        found.append((names, evaluations, {k: v.tolist() for k, v in weights.items()}))
    assert found[0] == found[1]
    assert found[0][0] == [f"step-{step:08d}" for step in (6, 4, 2, 0)]
    assert [step for step, _ in found[0][1]] == [3, 6]


def test_a_stop_that_the_user_asks_for(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with trainer:
        for batch in steps():
            trainer.step(batch)
            if trainer.clock.step == 2:
                trainer.stop()
            if trainer.should_stop:
                break
    assert trainer.clock.step == 2
    assert RunRecord.from_json((tmp_path / "run.json").read_text()).outcome == "stopped"
    again = make(tmp_path)
    with again:
        assert again.clock.step == 2
        assert not again.should_stop


def test_save_and_evaluate_when_asked(tmp_path: Path) -> None:
    trainer = make(tmp_path, evaluation=Evaluation(steps(), {"accuracy": accuracy}), config={"num_checkpoints": 5})
    assert trainer.evaluate() == {}
    with trainer:
        trainer.step(steps()[0])
        assert set(trainer.evaluate()) == {"accuracy"}
        trainer.save()
        trainer.save()
        trainer.step(steps()[1])
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000002", "step-00000001", "step-00000000"]


def test_the_plan_says_what_a_loop_of_ones_own_has_to_do() -> None:
    own = make()
    assert own.plan.holds("resume")
    assert "if your loop goes on with the rows of step `trainer.clock.step`" in str(own.plan)
    fitted = Trainer(nn.Linear(4, 1), lambda m, x: m(x).sum(), [torch.ones(4, 4)], optimizers=[AdamW(lr=0.01)])
    assert "your loop" not in str(fitted.plan)


LOOP = """
import signal, sys, torch
from pathlib import Path
from torch import nn
from cosmati import RunConfig, Trainer
from cosmati.optim import AdamW

signal.signal(signal.SIGINT, signal.default_int_handler)  # What a shell starts in the background ignores it.
model = nn.Linear(4, 1)
config = RunConfig(budget="1000000ba", num_threads=1, run_folder=Path(sys.argv[1]))
with Trainer(model, lambda m, x: m(x).square().mean(), optimizers=[AdamW(lr=0.01)], config=config) as trainer:
    print("begun", flush=True)
    while True:
        trainer.step(torch.ones(4, 4))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_are_the_loops_own(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with PythonProcess(["-c", LOOP, tmp_path / "run"]) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.wait(timeout=100) in (status, 128 + number, 1)
    record = RunRecord.from_json((tmp_path / "run" / "run.json").read_text())
    assert record.outcome == ("failed" if number == signal.SIGINT else "running")


def test_between_bare_steps_the_process_is_as_the_user_left_it() -> None:
    was = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(5)
    random.seed(5)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    expected = torch.random.get_rng_state()
    try:
        trainer = make()
        torch.random.set_rng_state(expected)
        for batch in steps():
            trainer.step(batch)
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.get_num_threads() == 2
            assert torch.equal(torch.random.get_rng_state(), expected)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        inside = make()
        with inside:
            for batch in steps():
                inside.step(batch)
        pairs = zip(trainer.model.parameters(), inside.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    finally:
        torch.set_num_threads(was)


def test_data_that_end_early_are_not_a_completed_run(tmp_path: Path) -> None:
    def once() -> Iterator[tuple[Tensor, Tensor]]:
        yield from steps()[:4]

    result = make(tmp_path, data=once()).fit()
    assert (result.outcome, result.clock.step) == ("exhausted", 4)
    assert RunRecord.from_json((tmp_path / "run.json").read_text()).outcome == "exhausted"
    assert make(data=steps()).fit().outcome == "completed"


def test_what_would_fail_at_the_first_evaluation_fails_before_the_first_step(tmp_path: Path) -> None:
    def broken(model: nn.Module, data: object) -> Tensor:
        raise ZeroDivisionError

    trainer = make(tmp_path, data=steps(), evaluation=Evaluation(steps(), {"broken": broken}))
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert trainer.clock.step == 0


# ----------------------------------------------------------------------------------------------------- what is saved

TOKENS = InMemory((torch.randint(5, (16, 3), generator=GENERATOR), torch.randint(5, (16, 3), generator=GENERATOR)), 4)


def token_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    config = {"checkpoint_every": "2ba"}
    whole = make(tmp_path / "whole", Tied(), TOKENS, loss=token_loss, config=config)
    whole.fit()
    stored = read_checkpoint(list_checkpoints(tmp_path / "whole" / "checkpoints")[0]).model
    assert set(stored) == {"embedding.weight", "view"}
    first = make(tmp_path / "run", Tied(), TOKENS, loss=token_loss, config=config)

    def interrupted() -> None:
        with first:
            for _ in range(3):
                assert first.feed is not None
                batches = first.feed.microbatches(first.clock, [0])
                assert batches is not None
                first.step(batches[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    again = make(tmp_path / "run", Tied(), TOKENS, loss=token_loss, config=config)
    again.fit()
    assert again.model.head.weight is again.model.embedding.weight
    assert torch.equal(again.model.head.weight, whole.model.head.weight)


def test_a_compiled_model_resumes(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        torch.manual_seed(0)
        return torch.compile(nn.Linear(4, 3), backend="eager")  # type: ignore[return-value]

    whole = make(model=compiled(), data=steps())
    whole.fit()
    first = make(tmp_path, compiled(), steps())
    with first:
        for batch in steps()[:3]:
            first.step(batch)
    assert set(read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0]).model) == {"weight", "bias"}
    again = make(tmp_path, compiled(), steps())
    assert again.fit().clock.step == 6
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))


def test_a_list_with_other_content_is_another_run(tmp_path: Path) -> None:
    trainer = make(tmp_path, data=steps(), config={"budget": "3ba"})
    trainer.fit()
    changed = steps()
    changed[4] = (changed[4][0] + 1e-3, changed[4][1])
    longer = {"budget": "6ba", "change": ("budget",)}
    with pytest.raises(CheckpointError, match="data: content"):
        make(tmp_path, data=changed, config=longer).fit()
    assert make(tmp_path, data=steps(), config=longer).fit().clock.step == 6


def test_the_pid_of_a_killed_run_is_no_lock(tmp_path: Path) -> None:
    with PythonProcess(["-c", LOOP, tmp_path / "run"]) as process:
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGKILL)
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[0].name == "step-00000000"


# ---------------------------------------------------------------------------------- models and optimizers that change


def _thaw(trainer: Trainer) -> None:
    trainer.model[0].weight.requires_grad_()


def _freeze(trainer: Trainer) -> None:
    trainer.model[1].weight.requires_grad_(requires_grad=False)


def _exchange(trainer: Trainer) -> None:
    trainer.model[1] = nn.Linear(4, 3)


def _add(trainer: Trainer) -> None:
    trainer.model.append(nn.Linear(3, 3))


def _group(trainer: Trainer) -> None:
    trainer.assembly.optimizers[0].optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_thaw, r"0\.weight trains now, and didn't"),
        (_freeze, r"1\.weight trained, and doesn't now"),
        (_exchange, r"1\.bias is another tensor"),
        (_add, r"2\.bias trains now"),
        (_group, "has another parameter group"),
    ],
)
def test_what_changes_after_the_plan_is_refused_by_name(change: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(requires_grad=False)
    trainer = make(model=model)
    batch = steps()[0]

    def changed() -> None:
        with trainer:
            trainer.step(batch)
            change(trainer)
            for _ in range(3):
                trainer.step(batch)

    with pytest.raises(PlanError, match=message):
        changed()


def test_an_optimizer_that_wants_a_closure_is_refused() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(PlanError, match=r"LBFGS asks for the loss several times"):
        Trainer(model, loss, steps(), optimizers=[torch.optim.LBFGS(model.parameters())], config=RunConfig())


@pytest.mark.parametrize("num_critic", [1, 2, 3])
def test_several_critic_steps_to_one_of_the_generator(num_critic: int) -> None:
    """The loop that everybody writes, by hand."""

    def models() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})

    def critic_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        fake = model["generator"](data[0]).detach()
        return (model["critic"](fake) - model["critic"](data[0])).mean()

    def generator_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return -model["critic"](model["generator"](data[0])).mean()

    losses = [
        SubStep("critic", critic_loss, "critic.*"),
        SubStep("generator", generator_loss, "generator.*", every=num_critic),
    ]
    model, expected = models(), models()
    optimizers = [AdamW(lr=0.01, parameters="critic.*"), AdamW(lr=0.01, parameters="generator.*")]
    config = RunConfig(budget="6ba", num_threads=1)
    with Trainer(model, losses, optimizers=optimizers, config=config) as trainer:
        for index in range(6):
            trainer.step(steps()[index % 5])
    by_hand = {name: AdamW(lr=0.01).build(list(expected[name].named_parameters())) for name in expected}
    for index in range(6):
        for name, function, every in (("critic", critic_loss, 1), ("generator", generator_loss, num_critic)):
            if index % every == 0:
                expected.zero_grad()
                function(expected, steps()[index % 5]).backward()
                by_hand[name].step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_checkpoints_by_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()
    monkeypatch.setattr(session, "monotonic", clock)
    trainer = make(tmp_path, config={"checkpoint_every": "10sec", "num_checkpoints": 9})
    with trainer:
        for index in range(6):
            clock.pass_by(4.0)
            trainer.step(steps()[index % 5])
    names = [path.name[-1] for path in list_checkpoints(tmp_path / "checkpoints")]
    # After 12 s, and 12 s later, which is the end.
    assert names == ["6", "3", "0"]


def test_rates_and_gradient_norms_are_reported(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    batch = steps()[0]
    loss(model, batch).backward()
    expected = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]).norm()
    model.zero_grad()
    for v in (1, 2):
        trainer = make(tmp_path / str(v), copy.deepcopy(model), config={"budget": "1ba", "num_microbatches": v})
        with trainer:
            trainer.step(batch)
        line = json.loads((tmp_path / str(v) / "steps.jsonl").read_text())
        assert line["gradient_norm"] == pytest.approx(float(expected), rel=1e-5)
        assert line["learning_rate"] == 0.01
