"""Chunks are dealt out to whoever has least so far, in as few runs as that allows, and travel in batches of 32 MiB."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.state import CHUNK_BYTES, merkle_root, tensor_root
from cosmati.train.layout import shares
from cosmati.train.layout.shares import (
    ElementRun,
    Held,
    Move,
    SharedTensor,
    Shares,
    num_hashes,
    roots_of,
    share_out,
)
from cosmati.train.layout.span import HeldSpan
from cosmati.train.ranks import Ranks

CHUNK = CHUNK_BYTES
"""Bytes of a chunk, which are elements here: all tensors are uint8, and none of them is made."""
BYTE = torch.uint8


def everybody(size: int, world: int = 2) -> tuple[torch.dtype, tuple[int, ...], list[Held]]:
    return BYTE, (size,), [Held(rank, 0, size) for rank in range(world)]


def test_what_one_rank_alone_holds_counts_before_the_rest_is_dealt_out() -> None:
    plan = share_out({"a": (BYTE, (3 * CHUNK,), [Held(0, 0, 3 * CHUNK)]), "b": everybody(3 * CHUNK)}, 2)
    assert plan["a"].runs == [ElementRun(0, 0, 3 * CHUNK)]
    assert plan["b"].runs == [ElementRun(1, 0, 3 * CHUNK)]
    plan = share_out({"a": everybody(3 * CHUNK), "b": (BYTE, (CHUNK,), [Held(0, 0, CHUNK)])}, 2)
    assert plan["a"].runs == [ElementRun(0, 0, CHUNK), ElementRun(1, CHUNK, 3 * CHUNK)]


def test_the_first_rank_begins_and_goes_on_to_its_share() -> None:
    plan = share_out({"a": everybody(4 * CHUNK)}, 2)
    assert plan["a"].runs == [ElementRun(0, 0, 2 * CHUNK), ElementRun(1, 2 * CHUNK, 4 * CHUNK)]
    wide = share_out({"a": (torch.float32, (CHUNK,), everybody(CHUNK)[2])}, 2)
    assert wide["a"].runs == [ElementRun(0, 0, CHUNK // 2), ElementRun(1, CHUNK // 2, CHUNK)]
    plan = share_out({"b": everybody(CHUNK), "a": everybody(CHUNK + 1)}, 2)
    assert list(plan) == ["a", "b"]
    assert plan["a"].runs == [ElementRun(0, 0, CHUNK), ElementRun(1, CHUNK, CHUNK + 1)]
    assert plan["b"].runs == [ElementRun(1, 0, CHUNK)]


def test_who_goes_on_has_some_of_the_chunk() -> None:
    plan = share_out(
        {"a": everybody(CHUNK, 3), "b": (BYTE, (3 * CHUNK,), [Held(1, 0, CHUNK + 5), Held(2, CHUNK + 5, 3 * CHUNK)])}, 3
    )
    assert plan["a"].runs == [ElementRun(0, 0, CHUNK)]
    assert plan["b"].runs == [ElementRun(1, 0, 2 * CHUNK), ElementRun(2, 2 * CHUNK, 3 * CHUNK)]
    assert plan["b"].moves == [Move(2, 1, CHUNK + 5, 2 * CHUNK)]


def test_a_run_is_sent_what_lies_before_and_behind_its_writers_own() -> None:
    held = [Held(0, 0, 5), Held(1, 5, 9), Held(2, 9, 20)]
    assert list(shares._moves(ElementRun(1, 0, 20), held)) == [Move(0, 1, 0, 5), Move(2, 1, 9, 20)]
    assert list(shares._moves(ElementRun(0, 3, 12), held)) == [Move(1, 0, 5, 9), Move(2, 0, 9, 12)]
    assert list(shares._moves(ElementRun(2, 9, 20), held)) == []
    assert list(shares._moves(ElementRun(2, 12, 12), held)) == []


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 99))
def test_the_level_is_that_of_water_poured_over_the_loads(loads: list[int], rest: int) -> None:
    level = shares._level(loads, rest)
    assert sum(max(level - load, 0) for load in loads) == pytest.approx(rest)
    assert level >= min(loads)
    if rest == 0:
        assert level == min(loads)


def test_an_empty_tensor_is_one_chunk_of_whoever_has_it() -> None:
    plan = share_out({"a": (BYTE, (0, 3), [Held(1, 0, 0)]), "b": (BYTE, (0,), [Held(0, 0, 0), Held(1, 0, 0)])}, 2)
    assert plan["a"].runs == [ElementRun(1, 0, 0)]
    assert plan["b"].runs == [ElementRun(0, 0, 0)]
    assert [num_hashes(plan, rank) for rank in (0, 1)] == [0, 0]
    assert plan["a"].moves == plan["b"].moves == []


@given(st.lists(st.integers(0, 40), max_size=9))
def test_batches_are_full_at_32_mebibytes_of_what_travels(sizes: list[int]) -> None:
    plan = {
        f"k{i}": SharedTensor(torch.float32, (1,), moves=[Move(0, 1, 7, 7 + (size << 18))])
        for i, size in enumerate(sizes)
    }
    wanted: list[list[str]] = []
    held = 0
    for i, size in enumerate(sizes):
        if wanted and held + size <= 32:
            wanted[-1].append(f"k{i}")
            held += size
        else:
            wanted.append([f"k{i}"])
            held = size
    assert list(shares._batches(plan)) == wanted


def test_a_batch_is_full_to_the_last_byte() -> None:
    def of(*sizes: int) -> list[int]:
        plan = {f"k{i}": SharedTensor(BYTE, (1,), moves=[Move(0, 1, 0, size)]) for i, size in enumerate(sizes)}
        return [len(batch) for batch in shares._batches(plan)]

    full = 32 << 20
    assert of(full - 1, 1) == [2]
    assert of(full - 1, 2) == [1, 1]
    assert of(full, 1, full - 1, 1) == [1, 2, 1]
    assert of() == []


def test_one_rank_by_itself_has_everything_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "exchange_device", lambda: torch.device("cpu"))
    spans = {"model/a": HeldSpan.of(torch.arange(6.0).view(2, 3)), "model/b": HeldSpan.of(torch.zeros(0, 2))}
    own = Shares(Ranks.alone())
    plan = own.plan(spans)
    found = list(own.parts(plan, spans))
    assert [(part.key, part.run) for part in found] == [
        ("model/a", ElementRun(0, 0, 6)),
        ("model/b", ElementRun(0, 0, 0)),
    ]
    assert torch.equal(found[0].content, torch.arange(6.0).view(torch.uint8))
    assert found[1].content.numel() == 0
    assert own._exchanged(plan, ["model/a"], spans) == {}
    roots = own.roots(spans)
    assert roots == {key: tensor_root(key[6:], span.tensor) for key, span in spans.items()}
    assert own.plan(dict(spans)) is plan
    for changed in (
        {"model/a": spans["model/a"]},
        {**spans, "model/b": HeldSpan.of(torch.zeros(0, 2).double())},
        {**spans, "model/a": HeldSpan(torch.arange(6.0), (6,))},
    ):
        assert own.plan(changed) is not plan
        plan = own.plan(changed)
        assert list(plan) == list(changed)
    assert own.roots({}) == {}


def test_a_run_is_put_together_in_order_of_what_is_held_and_sent() -> None:
    whole = torch.arange(10, dtype=BYTE)
    span = HeldSpan(whole[3:6], (10,), 3)
    sent = [(Move(1, 0, 6, 9), whole[6:9]), (Move(2, 0, 0, 3), whole[0:3]), (Move(1, 0, 9, 10), whole[9:10])]
    assert torch.equal(shares._content(ElementRun(0, 0, 9), span, sent), whole[:9])
    assert torch.equal(shares._content(ElementRun(0, 9, 10), span, sent), whole[9:])
    assert torch.equal(shares._content(ElementRun(0, 3, 9), span, sent), whole[3:9])
    assert torch.equal(shares._content(ElementRun(0, 4, 5), span, sent), whole[4:5])
    assert torch.equal(shares._content(ElementRun(0, 6, 9), None, sent), whole[6:9])
    assert shares._content(ElementRun(0, 0, 0), HeldSpan.of(whole[:0]), []).numel() == 0


def test_roots_take_each_ranks_hashes_in_the_order_of_keys_and_runs() -> None:
    tensors = {"m/a": torch.arange(3 * CHUNK + 5, dtype=torch.int64).to(BYTE), "m/b": torch.ones(CHUNK + 1, dtype=BYTE)}
    plan = share_out({key: everybody(len(one)) for key, one in tensors.items()}, 2)
    hashes = [b"", b""]
    for key, one in plan.items():
        for run in one.runs:
            part = tensors[key][run.start : run.stop]
            hashes[run.writer] += b"".join(shares.chunk_hashes(part))
    assert [len(own) // 32 for own in hashes] == [num_hashes(plan, rank) for rank in (0, 1)] == [3, 3]
    assert [num_hashes(share_out({"a": everybody(CHUNK)}, 2), rank) for rank in (0, 1)] == [1, 0]
    padded = [own + b"\0" * 64 for own in hashes]
    assert roots_of(plan, padded) == {key: tensor_root(key[2:], one) for key, one in tensors.items()}


def test_what_each_rank_is_sent_is_of_the_moves_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three ranks, which sends to one and is sent by both: by hand."""
    whole = torch.arange(40, dtype=BYTE)
    moves = [Move(1, 2, 10, 13), Move(0, 1, 3, 5), Move(2, 1, 30, 34), Move(1, 2, 14, 15)]
    plan = {"m/a": SharedTensor(BYTE, (40,), moves=moves)}
    seen: list[Any] = []

    def all_to_all(received: torch.Tensor, flat: torch.Tensor, due: list[int], sizes: list[int]) -> None:
        seen.append((flat.tolist(), due, sizes))
        received.copy_(torch.cat([whole[3:5], whole[30:34]]))

    monkeypatch.setattr(shares.dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(shares, "exchange_device", lambda: torch.device("cpu"))
    ranks: Any = SimpleNamespace(rank=1, world=3)
    found = Shares(ranks)._exchanged(plan, ["m/a"], {"m/a": HeldSpan(whole[8:20], (40,), 8)})
    assert seen == [([10, 11, 12, 14], [2, 0, 4], [0, 0, 4])]
    assert [(move, content.tolist()) for move, content in found["m/a"]] == [
        (moves[1], [3, 4]),
        (moves[2], [30, 31, 32, 33]),
    ]
    assert list(found) == ["m/a"]


def test_the_root_over_tensors_goes_by_their_own_names() -> None:
    roots = {"state/b": b"1" * 32, "model/c": b"2" * 32, "model/a": b"3" * 32}
    ordered = merkle_root([roots[key] for key in ("model/a", "state/b", "model/c")])
    assert shares.root_over(roots, roots) == shares.root_over(roots, reversed(list(roots))) == ordered
