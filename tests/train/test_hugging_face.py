"""A real Hugging Face model, built from its configuration, trained as a loop written by hand trains it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.loss import huggingface_loss
from cosmati.core.plan import Promise
from cosmati.optim import AdamW
from cosmati.testing.bare_loop import bare_loop
from cosmati.train.config import RunConfig
from cosmati.train.observers import History
from cosmati.train.trainer import Trainer

transformers = pytest.importorskip("transformers", reason="the extra `llm` isn't installed")
pytestmark = [pytest.mark.filterwarnings("ignore:::transformers"), pytest.mark.long]


def _gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def _batch(seed: int) -> object:
    tokens = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(seed))
    return transformers.BatchEncoding(
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    )


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_gpt2_trains_as_a_bare_loop_does(num_microbatches: int) -> None:
    torch.set_num_threads(1)
    model = _gpt2()
    plain, history, chosen = copy.deepcopy(model), History(), AdamW(lr=1e-2)
    steps = [_batch(seed) for seed in range(4)] * 5
    config = RunConfig(budget="20ba", seed=3, num_microbatches=num_microbatches, num_threads=1)
    Trainer(model, huggingface_loss, steps, optimizers=[chosen], observers=[history], config=config).fit()
    losses = [loss for _, loss in history.losses]
    assert losses[-1] < losses[0] - 0.2
    if num_microbatches == 1:
        cut = [[dict(step)] for step in steps]  # type: ignore[call-overload]
        bare = bare_loop(plain, huggingface_loss, cut, chosen.build(list(plain.named_parameters())), seed=3)
        assert losses == bare
        other = plain.state_dict()
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_hooks_that_collect_hidden_states_are_no_state() -> None:
    """Transformers installs them in the first pass that asks for hidden states."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        told = model(**batch, output_hidden_states=True)
        result: torch.Tensor = told.loss + 1e-3 * told.hidden_states[-1].pow(2).mean()
        return result

    config = RunConfig(budget="3ba", num_microbatches=4, num_threads=1)
    trainer = Trainer(_gpt2(), loss, [_batch(seed) for seed in range(3)], optimizers=[AdamW(lr=1e-2)], config=config)
    trainer.fit()
    for promise in (Promise.RESUME, Promise.ELASTIC):
        assert trainer.plan.holds(promise), str(trainer.plan)
