"""Sequence length warm-up: short sequences first (Li, Zhang and He, 2021, arXiv 2108.06084)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cosmati.core.batch import Batch, Data, InputKind, count_rows, iterate_tensors, map_tensors
from cosmati.core.clock import Budget
from cosmati.core.method import Method, Position, Stage
from cosmati.errors import BatchError, PlanError

__all__ = ["SeqLengthWarmup", "set_batch_sequence_length"]


def set_batch_sequence_length(
    batch: Data, curr_seq_len: int, truncate: bool = True, preserve_end_of_sequence: bool = False
) -> Data:
    """Shorten the sequences of a batch, by cutting them off or by cutting them up.

    Args:
        batch: a dictionary (`input_ids`, `attention_mask`, `labels`, ...), a tuple (input, target) or another
            nest of tensors [rows, length, ...]; or one tensor of tokens [rows, length + 1], whose last is
            only predicted.
        curr_seq_len: the new length; sequences that aren't longer are left alone.
        truncate: True drops what is beyond; False makes rows of it. A dictionary's or tuple's sequences are
            then laid end to end and what fills no row at the end is dropped, so a row may hold the end of one
            sequence and the start of the next, unless the length is a multiple of the new one. Of a token
            tensor each row is cut by itself, one token shared by neighbours, and its remainder is dropped.
        preserve_end_of_sequence: with `truncate`, put the last token of each sequence at the end of what is
            left. In a dictionary `attention_mask` says which is the last.

    Returns:
        A new nest; the batch itself where it's short enough.

    Raises:
        BatchError: a tensor isn't a sequence, the lengths differ, the new length isn't positive, or the
            attention mask is missing.
    """
    cut = _cut_of(batch, curr_seq_len, truncate, preserve_end_of_sequence)
    return batch if cut is None else map_tensors(cut, batch)


def _cut_of(
    data: Data, curr_seq_len: int, truncate: bool, preserve_end_of_sequence: bool
) -> Callable[[Tensor], Tensor] | None:
    """Return what shortens each tensor of a batch, and the lineage of its tokens; None where it's short enough."""
    extra = int(isinstance(data, Tensor))
    length = _length(data) - extra
    if curr_seq_len < 1:
        msg = f"curr_seq_len={curr_seq_len} leaves no sequence. Give at least 1."
        raise BatchError(msg)
    if curr_seq_len >= length:
        return None
    kept = curr_seq_len + extra
    if truncate:
        last = _last_token(data, length + extra) if preserve_end_of_sequence else None
        return lambda tensor: _cut_off(tensor, kept, last)
    if extra:
        return lambda tensor: tensor.unfold(1, kept, curr_seq_len).flatten(0, 1)
    return lambda tensor: _cut_up(tensor, curr_seq_len)


@dataclass(frozen=True, kw_only=True)
class SeqLengthWarmup(Method):
    """Lengthen the sequences in equal steps, over the first part of the run.

    With `truncate=False` each microbatch has more, shorter rows, and no token is dropped: the length is then
    the greatest one up to the schedule's that divides the batch's. A piece keeps the row id of its sequence.

    Args:
        duration: fraction of the run until the full length, in [0, 1]; 0 only cuts to `max_seq_length`.
        min_seq_length: tokens at the start.
        max_seq_length: tokens at the end, and for the rest of the run, also of longer sequences.
        step_size: tokens between one length and the next; multiples of 8 suit the hardware.
        truncate: drop what is beyond the length, or make rows of it.
        preserve_end_of_sequence: keep the last token when truncating (see `set_batch_sequence_length`).
    """

    stage: ClassVar[Stage] = Stage.SHAPE
    reads: ClassVar[frozenset[InputKind]] = frozenset({"tokens"})

    duration: float = 0.3
    min_seq_length: int = 8
    max_seq_length: int = 1024
    step_size: int = 8
    truncate: bool = True
    preserve_end_of_sequence: bool = False

    def __post_init__(self) -> None:
        """Check the schedule."""
        if not 0 <= self.duration <= 1:
            msg = f"duration={self.duration} is not a fraction of the run. Give a number from 0 to 1."
            raise PlanError(msg)
        if not 1 <= self.min_seq_length <= self.max_seq_length or not self.step_size >= 1:
            msg = (
                f"Lengths from {self.min_seq_length} to {self.max_seq_length} in steps of {self.step_size} "
                "don't grow. Give 1 <= min_seq_length <= max_seq_length and a step_size of at least 1 token."
            )
            raise PlanError(msg)

    def length(self, elapsed: float) -> int:
        """Return the sequence length, in tokens, after a fraction of the run."""
        if elapsed >= self.duration:
            return self.max_seq_length
        num_growths = (self.max_seq_length - self.min_seq_length) // self.step_size
        return self.min_seq_length + self.step_size * math.floor(elapsed / self.duration * num_growths)

    def shapes(self, budget: Budget) -> int:
        """Return a bound of the number of lengths that the run will see."""
        if self.duration == 0:
            return 1
        longest = self.max_seq_length
        if budget.tokens_per_row > 1:
            longest = max(self.min_seq_length, min(longest, budget.tokens_per_row))
        lengths = [*range(self.min_seq_length, longest, self.step_size), longest]
        num_steps = budget.num_steps
        return len(lengths) if num_steps is None else min(len(lengths), math.ceil(self.duration * num_steps) + 1)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with shorter sequences; pieces of one sequence follow one another."""
        curr_seq_len = self.length(at.elapsed)
        if not self.truncate:
            curr_seq_len = self._divisor(_length(batch.data) - int(isinstance(batch.data, Tensor)), curr_seq_len)
        cut = _cut_of(batch.data, curr_seq_len, self.truncate, self.preserve_end_of_sequence)
        if cut is None:
            return batch
        data = map_tensors(cut, batch.data)
        lineage = batch.lineage.cut(cut, count_rows(data) // batch.num_rows)
        return dataclasses.replace(batch, data=data, lineage=lineage)

    def _divisor(self, length: int, limit: int) -> int:
        """Return the greatest divisor of a length up to a limit."""
        divisor = next(number for number in range(min(limit, length), 0, -1) if length % number == 0)
        if divisor < min(self.min_seq_length, length):
            msg = (
                f"Sequences of {length} tokens can't be cut into equal pieces of {self.min_seq_length} to "
                f"{limit} tokens. Use another length of sequence (powers of two divide best), a longer "
                "min_seq_length, or truncate=True."
            )
            raise BatchError(msg)
        return divisor


def _length(data: Data) -> int:
    """Return the length that all sequences of a nest [rows, length, ...] share."""
    shapes = [tuple(tensor.shape) for tensor in iterate_tensors(data)]
    lengths = {shape[1] if len(shape) > 1 else None for shape in shapes}
    length = lengths.pop() if len(lengths) == 1 else None
    if length is None:
        msg = (
            "Sequence length warm-up needs tensors [rows, length, ...] that share their length; found "
            f"{shapes}. Take the others out of the batch, or make square attention masks in the model."
        )
        raise BatchError(msg)
    return length


def _last_token(data: Data, length: int) -> Tensor:
    """Return the index of each row's last token, int64 [rows]."""
    if isinstance(data, Mapping):
        if "attention_mask" not in data:
            msg = (
                "preserve_end_of_sequence=True needs `attention_mask`, to know where a sequence ends. Add "
                "it to the batch."
            )
            raise BatchError(msg)
        last: Tensor = data["attention_mask"].sum(dim=1).long() - 1
        return last.clamp(min=0)
    first = next(iterate_tensors(data))
    return torch.full((first.shape[0],), length - 1, device=first.device)


def _cut_off(tensor: Tensor, length: int, last: Tensor | None) -> Tensor:
    short = tensor[:, :length].contiguous()
    if last is None:
        return short
    rows = torch.arange(tensor.shape[0], device=tensor.device)
    last = last.to(tensor.device)  # Of lineage, which is on CPU, too.
    return short.index_put((rows, last.clamp(max=length - 1)), tensor[rows, last])


def _cut_up(tensor: Tensor, length: int) -> Tensor:
    flat = tensor.flatten(0, 1)
    return flat[: len(flat) // length * length].reshape(-1, length, *flat.shape[1:])
