"""An export says whose averages it holds: the method's that keeps them, or the optimizer's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from cosmati import Method, RunConfig, Trainer
from cosmati.core.plan import describe
from cosmati.methods import EMA, GradientClipping
from cosmati.optim import SGD, ScheduleFreeAdamW
from tests.train.test_watching import squared_error

CLIPPING, AVERAGE = GradientClipping(clipping_type="norm", clipping_threshold=9.0), EMA(half_life="2ba")


@pytest.mark.parametrize(
    ("methods", "optimizer", "whose"),
    [
        ([], SGD(lr=0.1), ""),
        ([CLIPPING], SGD(lr=0.1), ""),
        ([CLIPPING, AVERAGE], SGD(lr=0.1), describe(AVERAGE)),
        ([AVERAGE, CLIPPING], SGD(lr=0.1), describe(AVERAGE)),
        ([CLIPPING], ScheduleFreeAdamW(lr=0.1), "ScheduleFree"),
    ],
)
def test_who_keeps_the_averages_is_named(
    methods: Sequence[Method], optimizer: SGD | ScheduleFreeAdamW, whose: str
) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 3
    config = RunConfig(budget="3ba", num_threads=1)
    trainer = Trainer(nn.Linear(2, 1), squared_error, data, optimizers=optimizer, methods=methods, config=config)
    trainer.fit()
    assert trainer._whose_average() == whose
