"""A model without its computation: shapes, structure and parameters stay."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import LanguageModel
from cosmati.data.in_memory import InMemory
from cosmati.methods import NoOpModel
from cosmati.methods.no_op_model import apply_no_op
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import SGD, AdamW, Muon
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer


class Outputs(NamedTuple):
    logits: Tensor
    extra: dict[str, Tensor]
    note: str


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Outputs:
        self.calls += 1
        hidden = self.norm(self.layer(x)) * scale
        return Outputs(hidden, {"index": hidden.argmax(1)}, "as it was")


def test_keeps_structure_shapes_types_and_computes_once_for_each_shape() -> None:
    model = Structured()
    before = copy.deepcopy(model.state_dict())
    assert apply_no_op(model) is model
    for rows in (4, 4, 2, 4):
        output = model(torch.randn(rows, 3), scale=2.0)
        assert type(output) is Outputs
        assert output.logits.shape == (rows, 5)
        assert not output.logits.any()
        assert output.extra["index"].dtype == torch.int64
        assert output.note == "as it was"
    assert model.calls == 2
    assert model.training
    assert model.norm.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_parameter_that_learns_gets_a_gradient_of_zeros() -> None:
    model = apply_no_op(ResNet(ResNetConfig(widths=(4,))))
    model.head.weight.requires_grad_(requires_grad=False)
    nn.functional.cross_entropy(model(torch.randn(2, 1, 8, 8)), torch.tensor([0, 1])).backward()
    for name, parameter in model.named_parameters():
        if name == "head.weight":
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert not parameter.grad.any()


def test_is_idempotent_and_copies() -> None:
    model = apply_no_op(apply_no_op(Structured()))
    assert [kind.__name__ for kind in type(model).__mro__[:4]] == [
        "NoOpStructured",
        "NoOpForward",
        "Graft",
        "Structured",
    ]
    assert copy.deepcopy(model)(torch.ones(2, 3)).logits.shape == (2, 5)


@pytest.mark.parametrize("optimizers", [[SGD(lr=0.1)], [Muon(lr=0.02), AdamW(lr=0.01, weight_decay=0.0)]])
def test_runs_with_any_optimizers_and_moves_nothing(optimizers: list[SGD]) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=8, num_blocks=1, num_heads=2, sequence_length=8))
    before = copy.deepcopy(model.state_dict())
    tokens = torch.randint(0, 256, (16, 9))
    run = Trainer(
        model,
        LanguageModel(),
        InMemory((tokens[:, :-1], tokens[:, 1:]), rows_per_step=4),
        optimizers=optimizers,
        methods=[NoOpModel()],
        config=RunConfig(budget="3ba", num_microbatches=2),
    )
    assert run.fit().outcome == "completed"
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
