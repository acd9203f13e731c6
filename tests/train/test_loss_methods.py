"""Methods around the loss: in order, with a state of their own, on both roads, and through a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati import Classification, InMemory, Method, Position, RunConfig, Stage, Trainer
from cosmati.core.loss import Loss, LossFunction
from cosmati.core.method import State
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.models.mlp import MLP
from cosmati.optim import SGD

GENERATOR = torch.Generator().manual_seed(3)
ROWS = (torch.randn(32, 6, generator=GENERATOR), torch.randint(4, (32,), generator=GENERATOR))
BASE = Classification(4)


@dataclass(frozen=True, kw_only=True)
class WeightPenalty(Method):
    """Adds half the squared weights, times a share, to each microbatch's loss."""

    stage: ClassVar[Stage] = Stage.LOSS
    share: float = 0.1

    def loss(self, loss: LossFunction, state: State, at: Position) -> LossFunction:
        def penalized(model: nn.Module, data: Any) -> Loss:
            found = loss(model, data)
            assert isinstance(found, Loss)
            penalty = sum(p.square().sum() for p in model.parameters()) / 2
            return Loss(found.sum + self.share * penalty * found.weight, found.weight)

        return penalized


@dataclass(frozen=True, kw_only=True)
class SelfDistillation(Method):
    """Draws the logits to those of the weights of some steps ago, which it keeps."""

    stage: ClassVar[Stage] = Stage.LOSS
    share: float = 0.5

    def init(self, weights: Pieces) -> State:
        return dict(weights.copied().tensors)

    def loss(self, loss: LossFunction, state: State, at: Position) -> LossFunction:
        def distilled(model: nn.Module, data: Any) -> Loss:
            found = loss(model, data)
            assert isinstance(found, Loss)
            with torch.no_grad():
                wanted = torch.func.functional_call(model, state, (data[0],)).softmax(1)
            own = F.cross_entropy(model(data[0]), wanted, reduction="sum")
            return Loss(found.sum + self.share * own, found.weight)

        return distilled

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        return dict(weights.copied().tensors) if at.clock.step % 2 == 0 else state


@dataclass(frozen=True, kw_only=True)
class Doubled(Method):
    """Doubles whatever loss it is given."""

    stage: ClassVar[Stage] = Stage.LOSS

    def loss(self, loss: LossFunction, state: State, at: Position) -> LossFunction:
        def doubled(model: nn.Module, data: Any) -> Loss:
            found = loss(model, data)
            assert isinstance(found, Loss)
            return Loss(2 * found.sum, found.weight)

        return doubled


def train(methods: list[Method], *, v: int, steps: int = 6, folder: Path | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = RunConfig(budget="6ba", num_microbatches=v, num_threads=1, run_folder=folder, checkpoint_every="1ba")
    trainer = Trainer(MLP((6, 8, 4)), BASE, InMemory(ROWS, 8), optimizers=[SGD(lr=0.1)], methods=methods, config=config)
    if steps == 6:
        trainer.fit()
    else:
        assert trainer.feed is not None
        with trainer:
            for _ in range(steps):
                mine = trainer.feed.microbatches(trainer.clock, range(v))
                assert mine is not None
                trainer.step_microbatches(mine, [None] * v) if v > 1 else trainer.plain_step(mine[0])
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("v", [1, 4])
def test_a_penalty_is_weight_decay(v: int) -> None:
    """Half the squared weights in the loss is torch's coupled weight decay."""
    found = train([WeightPenalty(share=0.1)], v=v)
    torch.manual_seed(0)
    trainer = Trainer(
        MLP((6, 8, 4)),
        BASE,
        InMemory(ROWS, 8),
        optimizers=[SGD(lr=0.1, weight_decay=0.1)],
        config=RunConfig(budget="6ba", num_microbatches=v, num_threads=1),
    )
    trainer.fit()
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("v", [1, 4])
def test_order_is_the_users(v: int) -> None:
    inside = train([WeightPenalty(), Doubled()], v=v)
    outside = train([Doubled(), WeightPenalty()], v=v)
    both = train([WeightPenalty(share=0.05), Doubled()], v=v)
    for name in inside:
        assert not torch.equal(inside[name], outside[name])
        torch.testing.assert_close(both[name], outside[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("v", [1, 4])
def test_state_goes_through_a_checkpoint(v: int, tmp_path: Path) -> None:
    """The teacher is three steps old when the run stops: a run that forgot it would go on otherwise."""
    whole = train([SelfDistillation()], v=v)
    train([SelfDistillation()], v=v, steps=3, folder=tmp_path)
    resumed = train([SelfDistillation()], v=v, folder=tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    plain = train([], v=v)
    assert any(not torch.equal(whole[name], plain[name]) for name in whole)


def former(**hooks: Any) -> Method:
    kind = dataclass(frozen=True, kw_only=True)(type("Former", (Method,), {"stage": Stage.GRADIENT, **hooks}))
    return kind()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "method",
    [
        former(gradients=lambda self, gradients, parameters, regions: gradients),
        former(perturbation=lambda self, parameters, gradients, at: None),
        former(after=lambda self, state, model, at, learnt: state),
        former(init=lambda self, model: {}),
        former(batch=lambda self, batch: batch),
    ],
    ids=["gradients", "perturbation", "after", "init", "batch"],
)
def test_methods_written_the_old_way_are_refused(method: Method) -> None:
    with pytest.raises(PlanError, match=r"Former\.\w+\(.*can't be called: the loop gives .*writing-a-method"):
        Trainer(MLP((6, 4)), BASE, optimizers=[SGD(lr=0.1)], methods=[method])


def test_hooks_may_take_anything() -> None:
    method = former(gradients=lambda self, *given: given[0])
    Trainer(MLP((6, 4)), BASE, optimizers=[SGD(lr=0.1)], methods=[method])
