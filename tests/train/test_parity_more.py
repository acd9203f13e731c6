"""Parity where microbatches weigh unequally, weights are tied, and several optimizers share a model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.core.loss import Classification, LanguageModel, Loss
from cosmati.core.plan import Promise
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD, AdamW, Muon
from cosmati.optim.optimizers import Optimizer, matrices
from cosmati.testing.bare_loop import bare_loop
from cosmati.train.config import RunConfig
from cosmati.train.observers import History
from cosmati.train.trainer import Trainer
from tests.train.test_parity import ConvNet

pytestmark = pytest.mark.long

STEPS = 20
LENGTH = 7
Rows = tuple[Tensor, Tensor]
OPTIMIZERS: dict[str, list[Optimizer]] = {
    "sgd": [SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)],
    "adamw": [AdamW(lr=3e-3, weight_decay=0.1)],
    "muon": [Muon(lr=0.02, weight_decay=0.01), AdamW(lr=3e-3)],
}
each_optimizer = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
each_number = pytest.mark.parametrize("num_microbatches", [1, 4])


class ByHand:
    """Several optimizers over one model, as one writes them by hand: matrices to the first, the rest to the last."""

    def __init__(self, chosen: Sequence[Optimizer], model: nn.Module) -> None:
        named = list(model.named_parameters())
        shares = [named]
        if len(chosen) == 2:
            shares = [[(n, p) for n, p in named if matrices(n, p)], [(n, p) for n, p in named if not matrices(n, p)]]
            assert all(shares)
        self._parts = [one.build(share) for one, share in zip(chosen, shares, strict=True)]

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _cut(step: Rows, parts: int) -> list[Rows]:
    return list(zip(step[0].chunk(parts), step[1].chunk(parts), strict=True))


def _trained(
    model: nn.Module, loss: Any, steps: Sequence[Rows], optimizer: str, num_microbatches: int
) -> tuple[nn.Module, list[float]]:
    """Train a copy with the Trainer."""
    model, history = copy.deepcopy(model), History()
    config = RunConfig(budget=f"{len(steps)}ba", seed=9, num_microbatches=num_microbatches, num_threads=1)
    trainer = Trainer(model, loss, steps, optimizers=OPTIMIZERS[optimizer], observers=[history], config=config)
    assert trainer.plan.holds("parity")
    trainer.fit()
    return model, [value for _, value in history.losses]


def _looped(
    model: nn.Module, loss: Any, steps: Sequence[Rows], optimizer: str, num_microbatches: int
) -> tuple[nn.Module, list[float]]:
    """Train a copy with the bare loop."""
    model = copy.deepcopy(model)
    by_hand: Any = ByHand(OPTIMIZERS[optimizer], model)
    losses = bare_loop(model, loss, [_cut(step, num_microbatches) for step in steps], by_hand, seed=9)
    return model, losses


def _differing(a: nn.Module, b: nn.Module) -> list[str]:
    other = b.state_dict()
    return [name for name, value in a.state_dict().items() if not torch.equal(value, other[name])]


def _images(rows: int, steps: int = STEPS) -> list[Rows]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(rows, 1, 8, 8, generator=generator), torch.randint(5, (rows,), generator=generator))
        for _ in range(steps)
    ]


def _text(rows: int) -> list[Rows]:
    """Tokens with holes in the target, so that no two microbatches need weigh the same."""
    generator = torch.Generator().manual_seed(8)
    steps = []
    for _ in range(STEPS):
        tokens = torch.randint(20, (rows, LENGTH + 1), generator=generator)
        hidden = torch.rand(rows, LENGTH, generator=generator) < 0.3
        steps.append((tokens[:, :-1], tokens[:, 1:].masked_fill(hidden, -100)))
    return steps


def _tied_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(
            vocabulary_size=20, sequence_length=LENGTH, width=8, num_blocks=2, num_heads=2, dropout=0.1, tied=True
        )
    ).train()


def _cnn() -> nn.Module:
    torch.manual_seed(0)
    return ConvNet().train()


@pytest.mark.parametrize("rows", [12, 36])
@each_number
def test_muon_with_its_own_choice_of_matrices(num_microbatches: int, rows: int) -> None:
    steps, model = _images(rows), _cnn()
    trained, losses = _trained(model, Classification(5), steps, "muon", num_microbatches)
    plain, bare = _looped(model, Classification(5), steps, "muon", num_microbatches)
    assert _differing(trained, plain) == []
    assert losses == bare
    assert "norm.running_var" in _differing(trained, model)


@each_number
@each_optimizer
def test_a_language_model_whose_microbatches_weigh_unequally(optimizer: str, num_microbatches: int) -> None:
    steps, model = _text(12), _tied_gpt()
    weights = [int((target != -100).sum()) for _, target in _cut(steps[0], 4)]
    assert len(set(weights)) > 1
    trained, losses = _trained(model, LanguageModel(20), steps, optimizer, num_microbatches)
    plain, bare = _looped(model, LanguageModel(20), steps, optimizer, num_microbatches)
    assert _differing(trained, plain) == []
    assert losses == bare
    assert len(_differing(trained, model)) == len(dict(model.named_parameters(remove_duplicate=False)))


def _mean(model: nn.Module, data: Data) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def _sum(model: nn.Module, data: Data) -> Loss:
    return Loss(F.cross_entropy(model(data[0]), data[1], reduction="sum"), float(len(data[1])))


@each_number
@each_optimizer
def test_a_scalar_is_the_sum_by_its_weight(optimizer: str, num_microbatches: int) -> None:
    """Bit for bit where a microbatch's rows are a power of two: dividing by them is exact, early or late."""
    steps, model = _images(8 * num_microbatches), _cnn()
    scalar, scalar_losses = _trained(model, _mean, steps, optimizer, num_microbatches)
    summed, summed_losses = _trained(model, _sum, steps, optimizer, num_microbatches)
    assert _differing(scalar, summed) == []
    assert scalar_losses == pytest.approx(summed_losses, rel=1e-6)


@each_number
def test_a_scalar_is_the_sum_by_its_weight_but_for_rounding(num_microbatches: int) -> None:
    """Elsewhere each is its own bare loop, and the two agree as far as rounding lets them."""
    steps, model = _images(20, steps=8), _cnn()
    models = []
    for loss in (_mean, _sum):
        trained, losses = _trained(model, loss, steps, "sgd", num_microbatches)
        plain, bare = _looped(model, loss, steps, "sgd", num_microbatches)
        assert _differing(trained, plain) == []
        assert losses == bare
        models.append(trained)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(value, models[1].state_dict()[name], rtol=1e-4, atol=1e-5)


def _with_auxiliary_term(model: nn.Module, data: Data) -> Loss:
    logits = model(data[0])
    weight = float(len(data[1]))
    return Loss(F.cross_entropy(logits, data[1], reduction="sum"), weight, aux={"size": logits.square().mean()})


@pytest.mark.parametrize(
    "num_microbatches",
    [
        1,
        4,
    ],
)
def test_auxiliary_terms(num_microbatches: int) -> None:
    steps, model = _images(32, steps=5), _cnn()
    trained, losses = _trained(model, _with_auxiliary_term, steps, "sgd", num_microbatches)
    plain, bare = _looped(model, _with_auxiliary_term, steps, "sgd", num_microbatches)
    assert losses == pytest.approx(bare, rel=1e-6)
    assert _differing(trained, plain) == []


def test_batch_norm_in_bfloat16_gives_the_bits_of_a_bare_loop() -> None:
    """Statistics too, over 25 steps of four microbatches."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    steps = [(torch.randn(16, 1, 8, 8), torch.randint(3, (16,))) for _ in range(25)]
    bare, chosen = copy.deepcopy(model), SGD(lr=0.05)
    config = RunConfig(budget="25ba", seed=9, num_microbatches=4, num_threads=1, precision="bfloat16")
    trainer = Trainer(model, Classification(3), steps, optimizers=[chosen], config=config)
    assert trainer.plan.holds(Promise.PARITY)
    trainer.fit()

    def loss(network: nn.Module, data: Rows) -> Loss:
        with torch.autocast("cpu", torch.bfloat16):
            return Classification(3)(network, data)

    cut = [_cut(step, 4) for step in steps]
    bare_loop(bare, loss, cut, chosen.build(list(bare.named_parameters())), seed=9)
    expected = bare.state_dict()
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])] == []


def test_statistics_in_a_narrow_type_take_the_promise() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).bfloat16()
    for num_microbatches in (1, 4):
        config = RunConfig(budget="1ba", num_microbatches=num_microbatches, num_threads=1)
        trainer = Trainer(model, Classification(2), optimizers=[SGD(lr=0.1)], config=config)
        assert trainer.plan.holds(Promise.PARITY) == (num_microbatches == 1)
    assert "the statistics of 1 are folded, and aren't float32" in str(trainer.plan)
