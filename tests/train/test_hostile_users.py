"""Ordinary models, losses and recipes that once trained wrongly, moved with the cadences, or couldn't go on."""

from __future__ import annotations

import collections
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati import Evaluation, InMemory, RunConfig, Trainer
from cosmati.errors import CheckpointError
from cosmati.optim import SGD, AdamW
from cosmati.records.run import RunRecord
from cosmati.train.evaluation import accuracy
from cosmati.train.run.checkpoints import _digests, list_checkpoints

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(64, 4, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)


def plain_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def train(
    model: nn.Module, loss: Any = plain_loss, folder: Path | None = None, data: Any = None, **given: Any
) -> Trainer:
    config = {"budget": "6ba", "num_threads": 1, "run_folder": folder} | given.pop("config", {})
    data = InMemory(ROWS, 16) if data is None else data
    optimizers = given.pop("optimizers", [SGD(lr=0.1)])
    trainer = Trainer(model, loss, data, optimizers=optimizers, config=RunConfig(**config), **given)
    trainer.fit()
    return trainer


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def frozen() -> nn.Module:
    """A pretrained BatchNorm that is kept as it is, as detection models do."""
    model = network()
    model[1].running_mean.fill_(0.3)
    model[1].running_var.fill_(2.0)
    model[1].eval()
    model[3].eval()
    model[1].requires_grad_(requires_grad=False)
    return model


def test_a_frozen_batch_norm_reads_its_statistics_in_every_microbatch() -> None:
    expected, found = (train(frozen(), config={"num_microbatches": v}).model for v in (1, 4))
    for one, other in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(found[1].running_mean, torch.full((8,), 0.3))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_pass_in_eval_mode_before_the_losss_own_reads_the_running_statistics(num_microbatches: int) -> None:
    seen: list[Tensor] = []

    def pseudo(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        model.eval()
        with torch.no_grad():
            seen.append(model(data[0][:1] * 0 + 1))
        model.train()
        return plain_loss(model, data)

    model = network()
    copied = copy.deepcopy(model).eval()
    train(model, pseudo, config={"num_microbatches": num_microbatches, "budget": "1ba"})
    with torch.no_grad():
        expected = copied(torch.ones(1, 4))
    assert all(torch.equal(output, expected) for output in seen[:num_microbatches])


def test_an_evaluation_leaves_each_module_in_its_own_mode() -> None:
    evaluation = Evaluation([ROWS], {"accuracy": accuracy})
    config = {"evaluate_every": "2ba"}
    with_it, without = train(frozen(), evaluation=evaluation, config=config).model, train(frozen()).model
    assert not with_it[1].training
    assert not with_it[3].training
    assert with_it[2].training
    assert all(
        torch.equal(a, b) for a, b in zip(with_it.state_dict().values(), without.state_dict().values(), strict=True)
    )


class Moco(nn.Module):
    """A second encoder follows the first one in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3)
        self.key.requires_grad_(requires_grad=False)
        self.seen: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            for one, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                one.lerp_(other, 0.1)
        self.seen.append(len(rows))
        found: Tensor = self.query(rows) + self.key(rows)
        return found


class Centred(nn.Module):
    """A loss whose centre follows what it sees (DINO), and which counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.calls: list[int] = []

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        output = model(data[0]) - self.center
        self.center = self.center * 0.9 + output.detach().mean(0) * 0.1
        self.calls.append(1)
        return cross_entropy(output, data[1])


@pytest.mark.parametrize(("make", "loss"), [(Moco, lambda: plain_loss), (network, Centred)])
def test_checkpoints_change_no_training(tmp_path: Path, make: Any, loss: Any) -> None:
    losses = [loss(), loss()]
    never = train(make(), losses[0], tmp_path / "never")
    each = train(make(), losses[1], tmp_path / "each", config={"checkpoint_every": "1ba"})
    states = [trainer.model.state_dict() for trainer in (never, each)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    if isinstance(losses[0], Centred):
        assert [len(one.calls) for one in losses] == [6, 6], "the fixed microbatch is a copy's to see"
        assert torch.equal(losses[0].center, losses[1].center)


def test_a_loss_in_a_dictionary_is_compared_too(tmp_path: Path) -> None:
    class Weighed:
        def __init__(self, by: float) -> None:
            self._by = by

        def __call__(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return {"loss": plain_loss(model, data) * self._by}

    train(network(), Weighed(1.0), tmp_path, config={"budget": "3ba"})
    with pytest.raises(CheckpointError, match="a fixed microbatch has the loss"):
        train(network(), Weighed(-5.0), tmp_path, config={"change": "budget"})


@pytest.mark.parametrize("extra", [np.ones(16), ["a"] * 16, 3])
def test_a_batch_that_is_not_all_tensors_goes_on(tmp_path: Path, extra: Any) -> None:
    data = [(*[tensor[i : i + 16] for tensor in ROWS], extra) for i in range(0, 64, 16)]
    train(network(), folder=tmp_path, data=data, config={"budget": "3ba"})
    assert train(network(), folder=tmp_path, data=data, config={"change": "budget"}).clock.step == 6
    changed = [(*batch[:2], np.zeros(16) if isinstance(extra, np.ndarray) else "other") for batch in data]
    with pytest.raises(CheckpointError, match="data: content"):
        train(network(), folder=tmp_path, data=changed, config={"budget": "8ba", "change": "budget"})


def test_a_refused_resume_leaves_the_record(tmp_path: Path) -> None:
    train(network(), folder=tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"learning rate 9\.0"):
        train(network(), folder=tmp_path, optimizers=[SGD(lr=9.0)])
    assert (tmp_path / "run.json").read_bytes() == before
    assert RunRecord.from_json(before.decode()).outcome == "completed"


def test_groups_are_compared_by_their_parameters(tmp_path: Path) -> None:
    def groups(*names: str) -> Any:
        model = network()
        named = dict(model.named_parameters())
        first = {"params": [named[name] for name in names], "weight_decay": 0.5}
        rest = {"params": [p for name, p in named.items() if name not in names]}
        return model, [torch.optim.AdamW([first, rest], lr=0.01)]

    model, optimizers = groups("0.weight", "4.weight")
    train(model, folder=tmp_path, optimizers=optimizers, config={"budget": "3ba"})
    model, optimizers = groups("0.bias", "4.bias")
    with pytest.raises(CheckpointError, match=r"groups 0 0: 0 0\.bias, was 0\.weight"):
        train(model, folder=tmp_path, optimizers=optimizers, config={"change": "budget"})


def test_what_a_resume_goes_by_is_signed(tmp_path: Path) -> None:
    train(network(), folder=tmp_path, optimizers=[AdamW(lr=0.1)], config={"budget": "3ba", "ledger": True})
    newest = list_checkpoints(tmp_path / "checkpoints")[0]
    facts = json.loads((newest / "state.json").read_text())
    facts["optimizers"][0]["groups"][0]["weight_decay"] = 7.0
    (newest / "state.json").write_text(json.dumps(facts))
    (newest / "digests.json").write_text(json.dumps(_digests(newest)))
    with pytest.raises(CheckpointError, match="isn't one that the ledger has signed"):
        train(network(), folder=tmp_path, optimizers=[AdamW(lr=0.1)], config={"ledger": True, "change": "budget"})


def test_the_advice_of_a_diverged_run_can_be_followed(tmp_path: Path) -> None:
    train(network(), folder=tmp_path, config={"budget": "3ba"})
    trainer = train(network(), folder=tmp_path, config={"change": "budget", "on_divergence": "skip"})
    assert trainer.clock.step == 6


def test_the_parents_folder_may_be_gone(tmp_path: Path) -> None:
    train(network(), folder=tmp_path / "parent")
    config = {"load_weights": str(tmp_path / "parent")}
    train(network(), folder=tmp_path / "new", config=config | {"budget": "3ba"})
    (tmp_path / "parent").rename(tmp_path / "gone")
    assert train(network(), folder=tmp_path / "new", config=config | {"change": "budget"}).clock.step == 6


def test_a_bare_step_and_then_a_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    seen: list[tuple[int, bool]] = []

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        return plain_loss(model, data)

    trainer = Trainer(
        network(), loss, InMemory(ROWS, 16), optimizers=[SGD(lr=0.1)], config=RunConfig(budget="6ba", num_threads=1)
    )
    was = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trainer.step((ROWS[0][:16], ROWS[1][:16]))
        trainer.fit()
        assert torch.get_num_threads() == 2
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(was)
    assert seen == [(1, True)] * 6


def test_a_trainer_that_nobody_closed_holds_no_folder(tmp_path: Path) -> None:
    """A notebook's cell that is run again."""
    for _ in range(2):
        config = RunConfig(budget="6ba", num_threads=1, run_folder=tmp_path)
        trainer = Trainer(network(), plain_loss, optimizers=[SGD(lr=0.1)], config=config)
        trainer.step((ROWS[0][:16], ROWS[1][:16]))


TEACHER = nn.Linear(4, 3).requires_grad_(requires_grad=False)
SEEN: collections.Counter[str] = collections.Counter()


def taught(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """A teacher that follows, and a counter, both found by their names."""
    SEEN["calls"] += 1
    with torch.no_grad():
        for parameter in TEACHER.parameters():
            parameter.mul_(0.9)
    return plain_loss(model, data) + (model(data[0]) - TEACHER(data[0])).square().mean()


def _closed() -> tuple[Any, Any]:
    teacher, seen = nn.Linear(4, 3).requires_grad_(requires_grad=False), collections.deque[int]()

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        def follow() -> None:
            seen.append(1)
            with torch.no_grad():
                teacher.weight.mul_(0.9)

        follow()
        return plain_loss(model, data) + (model(data[0]) - teacher(data[0])).square().mean()

    return loss, lambda: (teacher.weight.detach().clone(), len(seen))


def _named() -> tuple[Any, Any]:
    SEEN.clear()
    return taught, lambda: (TEACHER.weight.detach().clone(), SEEN["calls"])


@pytest.mark.parametrize("make", [_closed, _named])
def test_what_a_function_closes_over_or_names_is_not_moved_by_checkpoints(tmp_path: Path, make: Any) -> None:
    found = []
    for every in (None, "1ba"):
        torch.manual_seed(3)
        nn.init.normal_(TEACHER.weight)
        loss, state = make()
        train(network(), loss, tmp_path / str(every), config={"checkpoint_every": every})
        found.append(state())
    assert found[0][1] == found[1][1] == 6
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.long
def test_masks_that_began_with_infinities_are_saved(tmp_path: Path) -> None:
    """Also those of a compiled model, whose names compilation changes, and of a loss."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

        def forward(self, rows: Tensor) -> Tensor:
            return torch.where(self.mask.isinf(), -9.0, self.layer(rows))

    class MaskedLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("least", torch.tensor(-torch.inf))

        def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
            return plain_loss(model, data).clamp(min=self.least)

    compiled = torch.compile(Masked(), backend="eager")
    assert train(compiled, MaskedLoss(), tmp_path).clock.step == 6  # type: ignore[arg-type]
