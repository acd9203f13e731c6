"""`compile_blocks`: blocks are compiled one by one, and the run is the same up to rounding."""

from __future__ import annotations

import shutil

import pytest
import torch

from cosmati.core.loss import LanguageModel
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from cosmati.train.observers import History
from cosmati.train.trainer import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_compiled_blocks_train_alike(num_microbatches: int) -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randint(32, (8, 9), generator=generator) for _ in range(4)]
    losses, names = {}, {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocabulary_size=32, sequence_length=8, width=16, num_blocks=2, num_heads=2))
        history = History()
        config = RunConfig(
            budget="12ba", num_microbatches=num_microbatches, num_threads=1, compile_blocks=compiled, seed=2
        )
        trainer = Trainer(
            model, LanguageModel(32), steps, optimizers=[AdamW(lr=1e-2)], observers=[history], config=config
        )
        trainer.fit()
        losses[compiled] = torch.tensor([loss for _, loss in history.losses])
        names[compiled] = sorted(trainer.model.state_dict())
    assert torch.allclose(losses[True], losses[False], rtol=1e-3)
    assert losses[True][-1] < losses[True][0]
    assert names[True] == names[False]
