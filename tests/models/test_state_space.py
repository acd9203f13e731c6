"""The state space model against its recurrence in float64, place by place; and documents that are kept apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cosmati import History, InMemory, LanguageModel, RunConfig, Trainer
from cosmati.errors import PlanError
from cosmati.models.gpt import places_in
from cosmati.models.state_space import (
    StateSpaceBlock,
    StateSpaceConfig,
    StateSpaceModel,
    selective_scan,
    short_convolution,
)
from cosmati.optim import AdamW

pytestmark = pytest.mark.long

SMALL = {"vocabulary_size": 11, "width": 6, "num_blocks": 2, "num_heads": 3, "state_size": 4, "kernel_size": 3}


def build(**changes: Any) -> StateSpaceModel:
    torch.manual_seed(0)
    return StateSpaceModel(StateSpaceConfig(**SMALL | changes))


def documents(rows: int, length: int, seed: int) -> Tensor:
    """Documents of random lengths, numbered from 0."""
    begins = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < 0.4
    return begins.long().cumsum(1)


@given(seed=st.integers(0, 999), rows=st.integers(1, 3), length=st.integers(1, 9))
def test_the_scan_is_the_recurrence(seed: int, rows: int, length: int) -> None:
    """S_t = exp(fading_t) S_(t-1) + write_t value_t^T, y_t = read_t S_t, with S = 0 where a document begins."""
    torch.manual_seed(seed)
    value = torch.randn(rows, length, 2, 3, dtype=torch.float64)
    fading = -torch.rand(rows, length, 2, dtype=torch.float64) * 3
    write, read = torch.randn(2, rows, length, 4, dtype=torch.float64)
    belongs = documents(rows, length, seed)
    found = selective_scan(value, fading, write, read, places_in(belongs))
    for row in range(rows):
        for head in range(2):
            state = torch.zeros(4, 3, dtype=torch.float64)
            for place in range(length):
                if place and belongs[row, place] != belongs[row, place - 1]:
                    state = torch.zeros_like(state)
                state = fading[row, place, head].exp() * state
                state = state + write[row, place][:, None] * value[row, place, head][None]
                torch.testing.assert_close(found[row, place, head], read[row, place] @ state, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 999), length=st.integers(1, 9), size=st.integers(1, 4))
def test_the_convolution_reads_its_own_document_alone(seed: int, length: int, size: int) -> None:
    torch.manual_seed(seed)
    content, kernel, bias = torch.randn(2, length, 3), torch.randn(3, size), torch.randn(3)
    belongs = documents(2, length, seed)
    found = short_convolution(content, kernel, bias, places_in(belongs))
    for row in range(2):
        for number in belongs[row].unique():
            own = belongs[row] == number
            padded = torch.nn.functional.pad(content[row, own].T[None], (size - 1, 0))
            expected = torch.nn.functional.conv1d(padded, kernel[:, None], bias, groups=3)
            torch.testing.assert_close(found[row, own], expected[0].T)


def test_a_fast_fading_head_is_stable() -> None:
    """The sums of a long row's fading are far beyond what exp can take; only differences count."""
    value, fading = torch.ones(1, 300, 1, 1), torch.full((1, 300, 1), -50.0)
    write = read = torch.ones(1, 300, 1)
    found = selective_scan(value, fading, write, read, torch.arange(300)[None])
    assert torch.equal(found, torch.ones_like(found))


def test_shapes_and_what_a_document_may_see() -> None:
    """Other tokens in one document change no bit elsewhere, and later tokens none before."""
    model = build()
    belongs = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    tokens = torch.arange(8)[None]
    plain = model(tokens, belongs)
    assert plain.shape == (1, 8, 11)
    assert plain.isfinite().all()
    other = model(torch.where(belongs == 1, 10 - tokens, tokens), belongs)
    assert torch.equal(plain[belongs != 1], other[belongs != 1])
    assert not torch.equal(plain[belongs == 1], other[belongs == 1])
    later = tokens.clone()
    later[0, 5] = 0
    assert torch.equal(plain[0, :5], model(later, belongs)[0, :5])
    assert not torch.equal(plain[0, 6], model(later, belongs)[0, 6])
    # Without documents the row is one.
    assert not torch.equal(model(tokens)[0, 7], plain[0, 7])


def test_a_document_is_what_it_would_be_in_a_row_of_its_own() -> None:
    model = build().double()
    tokens = torch.arange(8)[None]
    belongs = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    packed = model(tokens, belongs)
    for number in range(3):
        own = belongs == number
        torch.testing.assert_close(packed[own], model(tokens[own][None])[0], rtol=1e-12, atol=1e-12)
    ending = build(document_end=3).double()
    ended = ending(tokens)
    torch.testing.assert_close(ended[:, 4:], ending(tokens[:, 4:]), rtol=1e-12, atol=1e-12)


def test_step_sizes_begin_between_their_bounds() -> None:
    block = build(num_heads=12).blocks[0]
    assert isinstance(block, StateSpaceBlock)
    sizes = torch.nn.functional.softplus(block.size_bias)
    assert 1e-3 <= sizes.min() < sizes.max() <= 0.1 + 1e-6
    assert 0 <= block.log_rate.min() < block.log_rate.max() <= 2.78


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 0}, "at least 1"),
        ({"kernel_size": 0}, "at least 1"),
        ({"num_heads": 5}, "5 heads"),
        ({"document_end": 11}, "no token"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        build(**changes)


def test_it_learns_a_text() -> None:
    text = torch.frombuffer(bytearray(b"the cat sat on the mat and the dog sat on the log. " * 40), dtype=torch.uint8)
    rows = text[: 33 * 60].view(60, 33).long()
    torch.manual_seed(0)
    model = StateSpaceModel(StateSpaceConfig(width=32, num_blocks=2, num_heads=4))
    config = RunConfig(budget="60ba", num_threads=1)
    history = History()
    data = InMemory(rows, 12)
    Trainer(model, LanguageModel(256), data, optimizers=AdamW(lr=5e-3), observers=history, config=config).fit()
    losses = [loss for _, loss in history.losses]
    assert losses[0] > 4.0
    assert losses[-1] < 1.0
