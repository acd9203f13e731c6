"""Who writes, and hashes, which part of a state that ranks hold in spans: whole chunks, as even as what's held allows.

A chunk is what the Merkle tree of a tensor has as a leaf, 1 MiB. What one rank holds of it stays there; a chunk that
lies across ranks goes to one of them, and what all hold is dealt out. So no rank needs more memory than its share, and
roots come out as those of whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.core.state import CHUNK_BYTES, chunk_hashes, merkle_root, root_of_chunks
from cosmati.train.layout.span import HeldSpan
from cosmati.train.ranks import Ranks, exchange_device

_BATCH_BYTES = 32 << 20
"""Of what travels at once."""
_HASH_BYTES = 32


class Held(NamedTuple):
    """What a rank holds of a tensor: elements `start` to `stop - 1`."""

    rank: int
    start: int
    stop: int


class ElementRun(NamedTuple):
    """What a rank writes of a tensor: whole chunks of it, elements `start` to `stop - 1`."""

    writer: int
    start: int
    stop: int


class Move(NamedTuple):
    """Elements of a run that its writer is sent."""

    source: int
    writer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """One tensor of a state.

    Attributes:
        dtype: its type.
        shape: of the whole.
        runs: who writes what, in order, without a gap.
        moves: what travels for that.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: list[ElementRun] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def num_bytes(self, elements: int) -> int:
        """Return how many bytes so many elements have."""
        return elements * self.dtype.itemsize


SharePlan = Mapping[str, SharedTensor]
"""Tensors by key, in order; the same on every rank."""


class RunContent(NamedTuple):
    """A run of this rank's, with its canonical bytes: uint8, on the CPU."""

    key: str
    run: ElementRun
    content: Tensor


def share_out(holders: Mapping[str, tuple[torch.dtype, tuple[int, ...], Sequence[Held]]], world: int) -> SharePlan:
    """Return who writes what.

    Args:
        holders: by key a tensor's type, shape, and who holds what of it: all of them all of it, or each element one.
        world: number of ranks.
    """
    loads = [0] * world
    plan: dict[str, SharedTensor] = {}
    writers: dict[str, list[int]] = {}
    open_chunks: list[tuple[str, int, int, list[int]]] = []
    for key, (dtype, shape, held) in sorted(holders.items()):
        one = plan[key] = SharedTensor(dtype, shape)
        writers[key] = []
        for index, (start, stop) in enumerate(_chunks(one)):
            pool = _pool(held, start, stop)
            writers[key].append(pool[0])
            if len(pool) == 1:
                loads[pool[0]] += one.num_bytes(stop - start)
            else:
                open_chunks.append((key, index, one.num_bytes(stop - start), pool))
    share = _level(loads, sum(size for _, _, size, _ in open_chunks))
    last = 0
    for key, index, size, pool in open_chunks:
        if last not in pool or loads[last] + size > share:  # else it goes on: fewer, longer runs
            last = min(pool, key=loads.__getitem__)
        writers[key][index] = last
        loads[last] += size
    for key, one in plan.items():
        held = holders[key][2]
        one.runs.extend(_runs(one, writers[key]))
        one.moves.extend(move for run in one.runs for move in _moves(run, held))
    return plan


def _level(loads: Sequence[int], rest: int) -> float:
    """Return up to which load ranks are filled, where so many bytes are dealt out to those that have least."""
    for num in range(len(loads), 1, -1):
        least = sorted(loads)[:num]
        if (level := (sum(least) + rest) / num) >= least[-1]:
            return level
    return min(loads) + rest


def _chunks(one: SharedTensor) -> list[tuple[int, int]]:
    size, length = math.prod(one.shape), CHUNK_BYTES // one.dtype.itemsize
    return [(start, min(start + length, size)) for start in range(0, size, length)] or [(0, 0)]


def _pool(held: Sequence[Held], start: int, stop: int) -> list[int]:
    """Return who may write a chunk: who holds some of it; of an empty tensor, anybody who has it."""
    return [one.rank for one in held if one.start < stop and start < one.stop] or [one.rank for one in held]


def _runs(one: SharedTensor, writers: Sequence[int]) -> Iterator[ElementRun]:
    begun: ElementRun | None = None
    for writer, (start, stop) in zip(writers, _chunks(one), strict=True):
        if begun is not None and begun.writer == writer:
            begun = begun._replace(stop=stop)
            continue
        if begun is not None:
            yield begun
        begun = ElementRun(writer, start, stop)
    if begun is not None:
        yield begun


def _moves(run: ElementRun, held: Sequence[Held]) -> Iterator[Move]:
    own = next(one for one in held if one.rank == run.writer)
    at = run.start
    while at < run.stop:
        if own.start <= at < own.stop:
            at = min(own.stop, run.stop)
            continue
        source = next(one for one in held if one.start <= at < one.stop)
        end = min(source.stop, run.stop)
        yield Move(source.rank, run.writer, at, end)
        at = end


class Shares:
    """Deals a state out over the ranks. Its plan is made anew only where what ranks hold has changed.

    Args:
        ranks: the data-parallel ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._told: Mapping[str, Any] | None = None
        self._plan: SharePlan = {}

    def plan(self, spans: Mapping[str, HeldSpan]) -> SharePlan:
        """Return who writes what. Every rank has to ask."""
        told = {
            key: [str(span.tensor.dtype).removeprefix("torch."), list(span.shape), span.start, span.stop]
            for key, span in spans.items()
        }
        if self._ranks.agree(told != self._told):
            self._told = told
            holders: dict[str, tuple[torch.dtype, tuple[int, ...], list[Held]]] = {}
            for rank, own in enumerate(self._ranks.told_by_all(told)):
                for key, (dtype, shape, start, stop) in own.items():
                    found = holders.setdefault(key, (getattr(torch, dtype), tuple(shape), []))
                    found[2].append(Held(rank, start, stop))
            self._plan = share_out(holders, self._ranks.world)
        return self._plan

    def parts(self, plan: SharePlan, spans: Mapping[str, HeldSpan]) -> Iterator[RunContent]:
        """Yield this rank's runs, in the order of keys. Every rank has to take all."""
        rank = self._ranks.rank
        for keys in _batches(plan):
            received = self._exchanged(plan, keys, spans)
            for key in keys:
                for run in plan[key].runs:
                    if run.writer == rank:
                        yield RunContent(key, run, _content(run, spans.get(key), received.get(key, [])))

    def _exchanged(
        self, plan: SharePlan, keys: Sequence[str], spans: Mapping[str, HeldSpan]
    ) -> dict[str, list[tuple[Move, Tensor]]]:
        """Send what others write, and return what this rank was sent."""
        moves = [(key, move) for key in keys for move in plan[key].moves]
        if not moves:
            return {}
        rank, world, device = self._ranks.rank, self._ranks.world, exchange_device()

        def sizes(one: int, other: int) -> int:
            return sum(plan[k].num_bytes(m.stop - m.start) for k, m in moves if (m.source, m.writer) == (one, other))

        sent = [
            spans[key].content(move.start, move.stop).to(device)
            for writer in range(world)
            for key, move in moves
            if (move.source, move.writer) == (rank, writer)
        ]
        due = [sizes(source, rank) for source in range(world)]
        flat = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *sent])
        received = torch.empty(sum(due), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, flat, due, [sizes(rank, writer) for writer in range(world)])
        found: dict[str, list[tuple[Move, Tensor]]] = {}
        place, here = 0, received.cpu()
        for source in range(world):
            for key, move in moves:
                if (move.source, move.writer) == (source, rank):
                    size = plan[key].num_bytes(move.stop - move.start)
                    found.setdefault(key, []).append((move, here[place : place + size]))
                    place += size
        return found

    def roots(self, spans: Mapping[str, HeldSpan]) -> dict[str, bytes]:
        """Return the Merkle root of each whole tensor, by key; no rank holds more than its share, run by run."""
        plan = self.plan(spans)
        own = b"".join(one for part in self.parts(plan, spans) for one in chunk_hashes(part.content))
        most = max(num_hashes(plan, rank) for rank in range(self._ranks.world))
        table = torch.zeros(1, max(most, 1) * _HASH_BYTES, dtype=torch.uint8)
        table[0, : len(own)] = torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8)[: len(own)]
        everyone = self._ranks.gather_by_rank(table.to(exchange_device())).cpu()
        return roots_of(plan, [bytes(row.numpy()) for row in everyone])


def num_hashes(plan: SharePlan, rank: int) -> int:
    """Return how many chunks a rank hashes."""
    return sum(_num_chunks(one, run) for one in plan.values() for run in one.runs if run.writer == rank)


def _num_chunks(one: SharedTensor, run: ElementRun) -> int:
    return -(-one.num_bytes(run.stop - run.start) // CHUNK_BYTES)


def roots_of(plan: SharePlan, hashes: Sequence[bytes]) -> dict[str, bytes]:
    """Return the Merkle root of each tensor, by key.

    Args:
        plan: who has hashed what.
        hashes: of each rank's chunks, one after the other, in the order of keys and runs.
    """
    places = [0] * len(hashes)
    found: dict[str, bytes] = {}
    for key, one in plan.items():
        chunks: list[bytes] = []
        for run in one.runs:
            start, places[run.writer] = places[run.writer], places[run.writer] + _num_chunks(one, run) * _HASH_BYTES
            own = hashes[run.writer][start : places[run.writer]]
            chunks += [own[i : i + _HASH_BYTES] for i in range(0, len(own), _HASH_BYTES)]
        found[key] = root_of_chunks(name_of(key), one.dtype, one.shape, chunks)
    return found


def root_over(roots: Mapping[str, bytes], keys: Iterable[str]) -> bytes:
    """Return the Merkle root over some tensors, in the order of their names."""
    return merkle_root(roots[key] for key in sorted(keys, key=name_of))


def name_of(key: str) -> str:
    """Return the tensor's own name, of a key that says first what kind of thing it's of."""
    return key.partition("/")[2]


def _batches(plan: SharePlan) -> Iterator[list[str]]:
    batch, size = list[str](), 0
    for key, one in plan.items():
        moved = sum(one.num_bytes(move.stop - move.start) for move in one.moves)
        if batch and size + moved > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += moved
    if batch:
        yield batch


def _content(run: ElementRun, span: HeldSpan | None, received: Sequence[tuple[Move, Tensor]]) -> Tensor:
    """Put a run together of what this rank holds and what it was sent."""
    pieces = [(move.start, content) for move, content in received if run.start <= move.start < run.stop]
    if span is not None:
        start, stop = max(run.start, span.start), min(run.stop, span.stop)
        if start < stop or run.start == run.stop:
            pieces.append((start, span.content(start, stop).cpu()))
    pieces.sort(key=lambda one: one[0])
    return pieces[0][1] if len(pieces) == 1 else torch.cat([content for _, content in pieces])
