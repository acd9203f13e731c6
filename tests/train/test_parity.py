"""The promise `parity`: without methods the Trainer gives the bits of a loop written by hand."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.rng import position_key
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.mlp import MLP
from cosmati.optim import SGD, AdamW, Muon
from cosmati.testing.bare_loop import bare_loop
from cosmati.train.config import RunConfig
from cosmati.train.observers import History
from cosmati.train.trainer import Trainer

pytestmark = pytest.mark.long

STEPS = 20  # the last look at what the model keeps is at step 16
LOSS = Classification(num_classes=5)


class ConvNet(nn.Module):
    """A convolution, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(images)))
        return self.head(nn.functional.dropout(hidden.flatten(1), 0.2, self.training))


class Attention(nn.Module):
    """An encoder's parts: embedding, attention, LayerNorm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)).mean(1))


class Causal(nn.Module):
    """The library's GPT with dropout, its outputs read as classes."""

    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(vocabulary_size=16, sequence_length=6, width=8, num_blocks=2, num_heads=2, dropout=0.1)
        self.gpt = GPT(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens).mean(1)[:, :5]


def _images(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, 1, 8, 8, generator=generator)


def _tokens(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(16, (rows, 6), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "mlp": (lambda: MLP((64, 16, 5)), _images),
    "cnn": (ConvNet, _images),
    "attention": (Attention, _tokens),
    "gpt": (Causal, _tokens),
}
OPTIMIZERS = {
    "sgd": SGD(lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": AdamW(lr=1e-3, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _steps(kind: str, rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draw = MODELS[kind][1]
    return [(draw(rows, generator), torch.randint(5, (rows,), generator=generator)) for _ in range(STEPS)]


def _cut(step: tuple[Tensor, Tensor], parts: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(step[0].chunk(parts), step[1].chunk(parts), strict=True))


def _differing(a: nn.Module, b: nn.Module) -> list[str]:
    other = b.state_dict()
    return [name for name, value in a.state_dict().items() if not torch.equal(value, other[name])]


def _config(num_microbatches: int, **options: Any) -> RunConfig:
    return RunConfig(budget=f"{STEPS}ba", seed=3, num_microbatches=num_microbatches, num_threads=1, **options)


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind][0]().train()


def _cases() -> Iterator[Any]:
    """Yield all cases; half are `slow`, so that each three of the four settings still meet."""
    for places in itertools.product(range(len(MODELS)), range(2), range(2), range(2)):
        kind, optimizer, parts, rows = places
        values = list(MODELS)[kind], list(OPTIMIZERS)[optimizer], (1, 4)[parts], (24, 100)[rows]
        yield pytest.param(*values, marks=pytest.mark.slow if sum(places) % 2 else ())


@pytest.mark.parametrize(("kind", "optimizer", "num_microbatches", "rows"), list(_cases()))
def test_fit_is_the_bare_loop(kind: str, optimizer: str, num_microbatches: int, rows: int) -> None:
    steps, model = _steps(kind, rows), _model(kind)
    plain = copy.deepcopy(model)
    history = History()
    chosen = OPTIMIZERS[optimizer]
    trainer = Trainer(model, LOSS, steps, optimizers=[chosen], observers=[history], config=_config(num_microbatches))
    trainer.fit()
    assert trainer.plan.holds("parity")
    cut = [_cut(step, num_microbatches) for step in steps]
    losses = bare_loop(plain, LOSS, cut, chosen.build(list(plain.named_parameters())), seed=3)
    assert _differing(model, plain) == []
    assert [loss for _, loss in history.losses] == losses


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("kind", list(MODELS))
def test_muon_is_the_bare_loop(kind: str, num_microbatches: int) -> None:
    steps, model = _steps(kind, 24), _model(kind)
    plain = copy.deepcopy(model)
    hidden = next(name for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    chosen, rest = Muon(lr=0.01, parameters=hidden), SGD(lr=0.05, momentum=0.9)
    Trainer(model, LOSS, steps, optimizers=[chosen, rest], config=_config(num_microbatches)).fit()
    named = list(plain.named_parameters())

    class Both:
        """Two optimizers, as one writes them by hand."""

        parts = (
            chosen.build([(name, p) for name, p in named if name == hidden]),
            rest.build([(name, p) for name, p in named if name != hidden]),
        )

        def step(self) -> None:
            for part in self.parts:
                part.step()

        def zero_grad(self) -> None:
            for part in self.parts:
                part.zero_grad()

    bare_loop(plain, LOSS, [_cut(s, num_microbatches) for s in steps], Both(), seed=3)  # type: ignore[arg-type]
    assert _differing(model, plain) == []


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_loop_of_ones_own_is_fit(num_microbatches: int) -> None:
    steps, model = _steps("cnn", 12), _model("cnn")
    by_hand = copy.deepcopy(model)
    chosen = OPTIMIZERS["adamw"]
    Trainer(model, LOSS, steps, optimizers=[chosen], config=_config(num_microbatches)).fit()
    with Trainer(by_hand, LOSS, optimizers=[chosen], config=_config(num_microbatches)) as trainer:
        for step in steps:
            trainer.step(step)
    assert _differing(model, by_hand) == []


def test_another_seed_is_another_run() -> None:
    """The control: dropout's draws are part of the bits."""
    steps, model = _steps("cnn", 12), _model("cnn")
    plain = copy.deepcopy(model)
    chosen = OPTIMIZERS["sgd"]
    Trainer(model, LOSS, steps, optimizers=[chosen], config=_config(1)).fit()
    bare_loop(plain, LOSS, [[s] for s in steps], chosen.build(list(plain.named_parameters())), seed=4)
    assert position_key(3, "forward", 0, 0) != position_key(4, "forward", 0, 0)
    assert "head.weight" in _differing(model, plain)
