"""A state that ranks hold in spans is written by them in whole chunks, each once, to the whole tensors' roots."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cosmati.core import state as core_state
from cosmati.core.state import tensor_root
from cosmati.train.layout import shares
from cosmati.train.layout.shares import Held, Shares, name_of, num_hashes, root_over, share_out
from cosmati.train.layout.span import HeldSpan
from cosmati.train.ranks import Ranks
from tests.train.test_rank_sum import Threads, threads

__all__ = ["threads"]

CHUNK = 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(core_state, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(shares, "_BATCH_BYTES", 200)


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model/cut": torch.randn(37, 5, generator=generator),
        "model/double": torch.randn(23, generator=generator).double(),
        "model/everybody's": torch.randn(41, 3, generator=generator),
        "state/empty": torch.empty(0, 4),
        "state/scalar": torch.tensor(3.0),
        "state/one rank's": torch.arange(100),
        "state/half": torch.randn(64, generator=generator).half(),
    }


def spans_of(rank: int, world: int) -> dict[str, HeldSpan]:
    """Some are cut into equal runs of elements, which end within chunks; one is the last rank's, others everybody's."""
    found: dict[str, HeldSpan] = {}
    for key, tensor in whole().items():
        length = -(-tensor.numel() // world)
        if key in ("model/cut", "model/double", "state/half"):
            own = tensor.reshape(-1)[rank * length : (rank + 1) * length]
            if own.numel():
                found[key] = HeldSpan(own, tuple(tensor.shape), rank * length)
        elif key != "state/one rank's" or rank == world - 1:
            found[key] = HeldSpan.of(tensor)
    return found


def test_each_element_is_written_once_and_roots_are_those_of_whole_tensors(threads: Threads) -> None:
    def work(ranks: Ranks) -> Any:
        own = Shares(ranks)
        spans = spans_of(ranks.rank, ranks.world)
        plan = own.plan(spans)
        assert own.plan(dict(spans)) is plan, "nothing has changed"
        parts = [(part.key, tuple(part.run), bytes(part.content.numpy())) for part in own.parts(plan, spans)]
        return parts, own.roots(spans), [num_hashes(plan, rank) for rank in range(ranks.world)]

    everyone = threads.run(work)
    truth = whole()
    written: Counter[tuple[str, int]] = Counter()
    for rank, (parts, _, num) in enumerate(everyone):
        hashed = 0
        for key, (writer, start, stop), content in parts:
            tensor = truth[key]
            assert writer == rank
            assert content == bytes(tensor.contiguous().reshape(-1)[start:stop].view(torch.uint8).numpy())
            assert start * tensor.element_size() % CHUNK == 0
            assert stop == tensor.numel() or stop * tensor.element_size() % CHUNK == 0
            written.update((key, index) for index in range(start, stop))
            hashed += math.ceil(len(content) / CHUNK)
        assert hashed == num[rank]
    assert set(written.values()) == {1}
    assert len(written) == sum(tensor.numel() for tensor in truth.values())
    roots = {key: tensor_root(name_of(key), tensor) for key, tensor in truth.items()}
    assert all(found == roots for _, found, _ in everyone)
    sizes = [sum(len(content) for _, _, content in parts) for parts, _, _ in everyone]
    assert max(sizes) <= sum(sizes) / len(sizes) + 800, "as even as what one rank alone holds allows"


def test_a_plan_is_made_anew_for_all_where_one_rank_holds_something_else(threads: Threads) -> None:
    def work(ranks: Ranks) -> Any:
        own = Shares(ranks)
        spans = spans_of(ranks.rank, ranks.world)
        first = own.plan(spans)
        if ranks.rank == 0:
            spans["state/more"] = HeldSpan.of(torch.ones(3))
        second = own.plan(spans)
        assert second is not first
        return second.keys() - first.keys(), second["state/more"].runs

    for more, runs in threads.run(work):
        assert more == {"state/more"}
        assert [tuple(run) for run in runs] == [(0, 0, 3)]


def test_the_root_over_tensors_goes_by_their_own_names() -> None:
    roots = {"state/b": b"1" * 32, "model/c": b"2" * 32, "model/a": b"3" * 32}
    ordered = core_state.merkle_root([roots[key] for key in ("model/a", "state/b", "model/c")])
    assert root_over(roots, roots) == root_over(roots, reversed(list(roots))) == ordered
    assert root_over(roots, ["model/c", "model/a"]) == core_state.merkle_root([b"3" * 32, b"2" * 32])


@given(
    st.lists(st.lists(st.integers(0, 70), min_size=2, max_size=5), max_size=5),
    st.integers(0, 3),
)
def test_a_chunk_is_written_by_a_rank_that_holds_some_of_it(pieces: list[list[int]], num_whole: int) -> None:
    """Each tensor is cut into pieces of any lengths, one for each rank in turn; or all ranks hold all of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "CHUNK_BYTES", CHUNK)
        holders: dict[str, tuple[torch.dtype, tuple[int, ...], list[Held]]] = {}
        for number, lengths in enumerate(pieces):
            edges = [0, *itertools.accumulate(lengths)]
            held = [Held(rank, *edge) for rank, edge in enumerate(itertools.pairwise(edges)) if edge[0] < edge[1]]
            holders[f"cut {number}"] = torch.float32, (edges[-1],), held or [Held(1, 0, 0)]
        for number in range(num_whole):
            holders[f"whole {number}"] = torch.float64, (50,), [Held(rank, 0, 50) for rank in range(5)]
        plan = share_out(holders, 5)
    loads = Counter(dict.fromkeys(range(5), 0))
    for key, (dtype, shape, held) in holders.items():
        length, runs = CHUNK // dtype.itemsize, plan[key].runs
        for run in runs:
            own = [one for one in held if one.rank == run.writer]
            assert own, "whoever writes has some of the tensor"
            for start in range(run.start, run.stop, length):
                assert any(one.start < min(start + length, run.stop) and start < one.stop for one in own)
            loads[run.writer] += (run.stop - run.start) * dtype.itemsize
        assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
        assert runs[-1].stop == math.prod(shape)
        assert all(one.writer != other.writer for one, other in itertools.pairwise(runs)), "runs are as long as can be"
        wanted = {(run.writer, index) for run in runs for index in range(run.start, run.stop)}
        has = {(one.rank, index) for one in held for index in range(one.start, one.stop)}
        sent = [(move, index) for move in plan[key].moves for index in range(move.start, move.stop)]
        assert Counter((move.writer, index) for move, index in sent) == Counter(wanted - has)
        assert all((move.source, index) in has for move, index in sent)
    alone = max((loads[rank] for rank in range(5)), default=0)
    assert alone <= sum(loads.values()) / 5 + (0 if not pieces else sum(map(sum, pieces)) * 4) + CHUNK
