"""Embeddings of n-grams against whole numbers of any size and a sum by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cosmati.errors import PlanError
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.ngram_embedding import NgramEmbedding, hash_codes, ngram_codes
from cosmati.optim import AdamW, Muon, assign_parameters

torch.set_num_threads(1)


def row_of(tokens: list[int], place: int, length: int, vocabulary_size: int, num_rows: int) -> int:
    """Compute an n-gram's row with Python's integers: digits in base V + 1, times 2^64 / phi, its upper half."""
    code = 0
    for back in range(length):
        code += (tokens[place - back] + 1 if place >= back else 0) * (vocabulary_size + 1) ** back
    product = code * 0x9E3779B97F4A7C15 % 2**64
    upper = product >> 32
    return (upper - 2**32 if upper >= 2**31 else upper) % num_rows


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=9),
    st.integers(1, 9),
    st.sampled_from([1, 7, 4096, 8192, 1_000_003]),
)
def test_rows_are_those_of_whole_numbers(tokens: list[int], length: int, num_rows: int) -> None:
    codes = ngram_codes(torch.tensor([tokens]), length, 256)
    rows = hash_codes(codes[-1], num_rows)[0].tolist()
    assert rows == [row_of(tokens, place, length, 256, num_rows) for place in range(len(tokens))]


def test_different_ngrams_have_different_numbers() -> None:
    every = torch.cartesian_prod(*(torch.arange(5) for _ in range(3)))
    codes = ngram_codes(every, 3, 5)[-1]
    assert len(codes[:, -1].unique()) == 125
    # One of two tokens at a row's start isn't the same as one that begins with token 0.
    assert len(torch.cat([codes[:, 1], codes[:, 2]]).unique()) == 25 + 125


def test_hash_spreads_ngrams_evenly() -> None:
    pairs = torch.cartesian_prod(torch.arange(32, 127), torch.arange(32, 127))
    counts = torch.bincount(hash_codes(ngram_codes(pairs, 2, 256)[-1][:, 1], 8192), minlength=8192)
    # 9,025 pairs: a random function hits 8192 * (1 - exp(-9025 / 8192)) = 5,470 rows.
    assert int((counts > 0).sum()) >= 5400
    assert int(counts.max()) <= 8


def test_embedding_is_the_sum_over_lengths() -> None:
    torch.manual_seed(0)
    layer = NgramEmbedding((3, 2), 11, 20, 4).double()
    for table in layer.tables:
        assert isinstance(table, nn.Embedding)
        nn.init.normal_(table.weight)
    tokens = torch.randint(0, 11, (3, 7))
    weights = [table.weight.detach() for table in layer.tables if isinstance(table, nn.Embedding)]
    found = layer(tokens.to(torch.uint8))
    for row, line in enumerate(tokens.tolist()):
        for place in range(7):
            expected = sum(
                weight[row_of(line, place, length, 11, 20)] for length, weight in zip((3, 2), weights, strict=True)
            )
            torch.testing.assert_close(found[row, place], expected)


def test_gpt_starts_as_it_does_without_and_learns_the_tables() -> None:
    torch.manual_seed(0)
    plain = GPT(GPTConfig(vocabulary_size=11, sequence_length=8, width=12, num_blocks=1, num_heads=3))
    torch.manual_seed(0)
    options = {"ngrams": (2, 3), "ngram_rows": 16}
    model = GPT(GPTConfig(vocabulary_size=11, sequence_length=8, width=12, num_blocks=1, num_heads=3, **options))  # type: ignore[arg-type]
    tokens = torch.randint(0, 11, (2, 8))
    assert torch.equal(model(tokens), plain(tokens))
    model(tokens).square().sum().backward()
    named = dict(model.named_parameters())
    tables = [f"ngram_embedding.tables.{i}.weight" for i in range(2)]
    assert named.keys() - dict(plain.named_parameters()).keys() == {*tables}
    assert all(named[name].grad is not None and named[name].shape == (16, 12) for name in tables)
    # Muon is for hidden matrices, and leaves them to AdamW.
    taken, rest = assign_parameters([Muon(lr=0.1), AdamW(lr=0.1)], list(named.items()))
    assert {*tables} <= {name for name, _ in rest}
    assert not {*tables} & {name for name, _ in taken}


@pytest.mark.parametrize(("lengths", "num_rows"), [((), 8), ((1, 2), 8), ((2, 2), 8), ((2,), 0)])
def test_impossible_options_are_refused(lengths: tuple[int, ...], num_rows: int) -> None:
    with pytest.raises(PlanError, match="can't be embedded"):
        NgramEmbedding(lengths, 11, num_rows, 4)
