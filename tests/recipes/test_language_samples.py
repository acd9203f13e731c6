"""What a model of bytes writes, and its loss by class: against enumeration and brute force."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import DataError
from cosmati.recipes.language_samples import ALL, loss_by_class, write_bytes
from cosmati.train.evaluation import Evaluation, batches, evaluate
from cosmati.train.ranks import Ranks


class Table(nn.Module):
    """The next byte's logits by the last byte alone."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits[tokens.long()]


def chain() -> Table:
    """After `a` comes `b`, after `b` comes `c`, after `c` the end."""
    logits = torch.full((256, 256), -100.0)
    for before, after in zip(b"abc", b"bc\0", strict=True):
        logits[before, after] = 100.0
    return Table(logits)


def test_it_goes_on_to_where_the_model_ends_the_file() -> None:
    assert write_bytes(chain(), b"xa", 10, context=4, seed=0) == b"bc"
    assert write_bytes(chain(), b"a", 1, context=4, seed=0) == b"b"


def test_the_same_draws_write_the_same_whatever_was_drawn_before() -> None:
    model = Table(torch.zeros(256, 256))
    first = write_bytes(model, b"a", 20, context=8, seed=3)
    torch.rand(5)
    state = torch.get_rng_state()
    assert write_bytes(model, b"a", 20, context=8, seed=3) == first
    assert torch.equal(torch.get_rng_state(), state), "the default generator isn't touched"
    assert write_bytes(model, b"a", 20, context=8, seed=4) != first


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.full((256, 256), -100.0)
    logits[:, 97], logits[:, 98] = 1.0, 0.0
    counts = Counter(write_bytes(Table(logits), b"a", 2000, context=2, seed=0, temperature=0.5))
    expected = 1 / (1 + math.exp(-2.0))
    assert counts[97] / 2000 == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 2000))


def test_the_model_sees_no_more_than_the_context_and_keeps_its_mode() -> None:
    lengths = []

    class Watched(Table):
        def forward(self, tokens: Tensor) -> Tensor:
            lengths.append(tokens.shape[1])
            assert not self.training
            return super().forward(tokens)

    model = Watched(torch.zeros(256, 256)).train()
    write_bytes(model, b"abcdef", 6, context=3, seed=1)
    assert max(lengths) == 3
    assert model.training


@pytest.mark.parametrize(("prompt", "temperature"), [(b"", 1.0), (b"a", 0.0), (b"a", math.nan)])
def test_what_nothing_can_be_drawn_from_is_refused(prompt: bytes, temperature: float) -> None:
    with pytest.raises(DataError, match="nothing can be drawn"):
        write_bytes(chain(), prompt, 1, context=4, seed=0, temperature=temperature)


def test_losses_by_class_are_those_of_a_loop_over_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Table(torch.randn(256, 256, generator=generator))
    tokens = torch.randint(0, 256, (10, 6), generator=generator).to(torch.uint8)
    classes = torch.tensor([0, 2, 2, 0, 2, 2, 2, 0, 2, 2])
    data = batches((tokens[:, :-1], tokens[:, 1:], classes), 4)
    metrics = {"loss": loss_by_class(("a", "b", "c"))}
    device = torch.device("cpu")
    found = evaluate(
        model, Evaluation(data, metrics), Ranks.alone(), device, torch.autocast(device.type, enabled=False)
    )
    rows = [-sum(model.logits[a].log_softmax(0)[b].item() for a, b in pairwise(row)) / 5 for row in tokens.long()]
    means = {name: [rows[i] for i in range(10) if classes[i] == index] for index, name in enumerate("abc")}
    assert found == pytest.approx(
        {f"loss/{ALL}": sum(rows) / 10}
        | {f"loss/{name}": sum(values) / len(values) for name, values in means.items() if values},
        rel=1e-5,
    )
