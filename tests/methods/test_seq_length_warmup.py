"""Sequence length warm-up: which tokens are left, which are predicted, and whose they are."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import LanguageModel
from cosmati.core.method import Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.seq_length_warmup import SeqLengthWarmup, set_batch_sequence_length

torch.set_num_threads(1)


def position(step: int, num_steps: int = 100) -> Position:
    return Position(Clock(step=step), Budget(Time.parse(f"{num_steps}ba")), 3, 0, nn.Identity(), LanguageModel())


def batch_of(data: Any, rows: int) -> Batch:
    return Batch(data, Lineage.of_rows(70, rows))


def numbered(rows: int, length: int) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length)


def pairs(input: Tensor, target: Tensor) -> collections.Counter[tuple[int, int]]:
    """Count which token is predicted after which."""
    return collections.Counter(zip(input.flatten().tolist(), target.flatten().tolist(), strict=True))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 30), st.booleans())
def test_dictionaries(rows: int, length: int, new: int, truncate: bool) -> None:
    batch = {"input_ids": numbered(rows, length), "labels": -numbered(rows, length)}
    before = {name: value.clone() for name, value in batch.items()}
    result = set_batch_sequence_length(batch, new, truncate)
    if new >= length:
        assert result is batch
    elif truncate:
        assert torch.equal(result["input_ids"], before["input_ids"][:, :new])
    else:
        flat = [token for row in before["input_ids"].tolist() for token in row]
        expected = [flat[start : start + new] for start in range(0, rows * length - new + 1, new)]
        assert result["input_ids"].tolist() == expected
    assert torch.equal(result["labels"], -result["input_ids"])
    assert all(torch.equal(batch[name], value) for name, value in before.items())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 30))
def test_token_tensors_predict_every_kept_token(rows: int, length: int, new: int) -> None:
    tokens = numbered(rows, length + 1)
    short = set_batch_sequence_length(tokens, new)
    assert torch.equal(short, tokens[:, : new + 1])
    pieces = set_batch_sequence_length(tokens, new, truncate=False)
    new = min(new, length)
    assert pieces.shape == (rows * (length // new), new + 1)
    kept = length // new * new
    assert pairs(pieces[:, :-1], pieces[:, 1:]) == pairs(tokens[:, :kept], tokens[:, 1 : kept + 1])


def test_the_end_of_the_sequence_is_kept() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 0, 0], [30, 31, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    result = set_batch_sequence_length(batch, 3, preserve_end_of_sequence=True)
    assert result["input_ids"].tolist() == [[10, 11, 15], [20, 21, 23], [30, 31, 0], [0, 0, 0]]
    assert result["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert ids[0].tolist() == [10, 11, 12, 13, 14, 15]
    assert set_batch_sequence_length(ids[:1], 3, preserve_end_of_sequence=True).tolist() == [[10, 11, 12, 15]]
    pair = set_batch_sequence_length((ids[:2], -ids[:2]), 2, preserve_end_of_sequence=True)
    assert pair[0].tolist() == [[10, 15], [20, 0]]
    masked = {"input_ids": ids[:1], "attention_mask": torch.zeros(1, 6)}
    assert set_batch_sequence_length(masked, 3, preserve_end_of_sequence=True)["input_ids"].tolist() == [[10, 11, 12]]
    with pytest.raises(BatchError, match="attention_mask"):
        set_batch_sequence_length({"input_ids": ids}, 3, preserve_end_of_sequence=True)


def test_embeddings_keep_their_last_dimension() -> None:
    vectors = torch.rand(2, 6, 5)
    result = set_batch_sequence_length((vectors, vectors[..., 0]), 3, truncate=False)
    assert torch.equal(result[0], vectors.reshape(4, 3, 5))
    assert torch.equal(result[1], vectors[..., 0].reshape(4, 3))


@pytest.mark.parametrize("kind", ["tokens", "pair", "dictionary"])
def test_method_equals_function(kind: str) -> None:
    tokens = numbered(3, 33)
    data = {
        "tokens": tokens,
        "pair": (tokens[:, :-1], tokens[:, 1:]),
        "dictionary": {"input_ids": tokens[:, 1:]},
    }[kind]
    method = SeqLengthWarmup(duration=0.5, max_seq_length=32)
    result = method.batch(batch_of(data, 3), position(20))
    expected = set_batch_sequence_length(data, 16)
    assert torch.equal(torch.cat([*map(torch.as_tensor, _tensors(result.data))]), torch.cat(_tensors(expected)))
    assert torch.equal(result.lineage.row_ids, torch.arange(3) + 70)


def _tensors(data: Any) -> list[Tensor]:
    return [data] if isinstance(data, Tensor) else list(data.values() if isinstance(data, dict) else data)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.sampled_from([8, 24, 32, 48, 64]), st.integers(0, 100), st.booleans())
def test_pieces_lose_nothing_and_know_their_row(rows: int, length: int, step: int, as_pair: bool) -> None:
    tokens = numbered(rows, length + 1)
    data = (tokens[:, :-1], tokens[:, 1:]) if as_pair else tokens
    method = SeqLengthWarmup(duration=1.0, min_seq_length=8, max_seq_length=64, truncate=False)
    result = method.batch(batch_of(data, rows), position(step))
    input, target = result.data if as_pair else (result.data[:, :-1], result.data[:, 1:])
    assert pairs(input, target) == pairs(tokens[:, :-1], tokens[:, 1:])
    assert torch.equal(result.lineage.row_ids, input[:, 0] // (length + 1) + 70)
    assert input.shape[1] <= method.length(step / 100)
    assert result.num_rows == len(input)


def test_the_schedule() -> None:
    method = SeqLengthWarmup(duration=0.4, min_seq_length=8, max_seq_length=24, step_size=8)
    assert [method.length(elapsed) for elapsed in (0.0, 0.19, 0.2, 0.39, 0.4, 1.0)] == [8, 8, 16, 16, 24, 24]
    uneven = SeqLengthWarmup(min_seq_length=8, max_seq_length=20, step_size=8)
    assert [uneven.length(elapsed) for elapsed in (0.0, 0.29, 0.3)] == [8, 8, 20]
    assert SeqLengthWarmup(min_seq_length=8, max_seq_length=8).length(0.1) == 8
    assert SeqLengthWarmup(duration=0.0).length(0.0) == 1024


@settings(deadline=None, max_examples=80)
@given(st.floats(0, 1), st.integers(1, 30), st.integers(0, 60), st.integers(1, 20), st.integers(1, 300))
def test_lengths_grow_and_are_counted(duration: float, first: int, more: int, step_size: int, num_steps: int) -> None:
    method = SeqLengthWarmup(duration=duration, min_seq_length=first, max_seq_length=first + more, step_size=step_size)
    lengths = [method.length(step / num_steps) for step in range(num_steps)]
    assert lengths == sorted(lengths)
    assert all(first <= length <= first + more for length in lengths)
    assert len(set(lengths)) <= method.shapes(Budget(Time.parse(f"{num_steps}ba")))
    assert len({min(length, 25) for length in lengths}) <= method.shapes(
        Budget(Time.parse(f"{num_steps}ba"), tokens_per_row=25)
    )


def test_shapes() -> None:
    method = SeqLengthWarmup(max_seq_length=64)
    assert method.shapes(Budget(Time.parse("1000ba"))) == 8
    assert method.shapes(Budget(Time.parse("1000ba"), tokens_per_row=32)) == 4
    assert method.shapes(Budget(Time.parse("90sec"))) == 8
    assert SeqLengthWarmup(duration=0.0).shapes(Budget(Time.parse("90sec"))) == 1


def test_off_is_the_same_batch_and_declarations() -> None:
    batch = batch_of(numbered(2, 17), 2)
    off = SeqLengthWarmup(duration=0.0, max_seq_length=16)
    assert off.batch(batch, position(0)) is batch
    assert SeqLengthWarmup(truncate=False).batch(batch, position(90)) is batch
    assert off.batch(batch_of(numbered(2, 41), 2), position(0)).data.shape == (2, 17)
    assert (off.stage, off.couples, off.claims, off.reads) == (
        Stage.SHAPE,
        frozenset(),
        frozenset(),
        {"tokens"},
    )


def test_bad_input_is_refused() -> None:
    for options in ({"duration": 1.1}, {"min_seq_length": 0}, {"max_seq_length": 4}, {"step_size": 0}):
        with pytest.raises(PlanError):
            SeqLengthWarmup(**options)
    tokens = numbered(2, 12)
    with pytest.raises(BatchError, match="share their length"):
        set_batch_sequence_length({"input_ids": tokens, "row_weight": torch.ones(2)}, 4)
    with pytest.raises(BatchError, match="share their length"):
        set_batch_sequence_length({"input_ids": tokens, "mask": torch.ones(2, 1, 12, 12)}, 4)
    with pytest.raises(BatchError, match="at least 1"):
        set_batch_sequence_length(tokens, 0)
    with pytest.raises(BatchError, match="equal pieces"):
        SeqLengthWarmup(truncate=False).batch(batch_of(numbered(2, 24), 2), position(0))
