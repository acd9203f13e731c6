"""Which state a rank holds where parameters are cut by rows: its rows, an owner's matrices, or the first rank's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.train.layout.shard_cut import RowCut, RowsCut
from cosmati.train.layout.shard_state import ShardState
from cosmati.train.ranks import Ranks

SHAPES = {"a": (5, 2), "b": (4,), "deep/c": (3, 2)}
WORLD = 2


def state_of(rank: int, *staged: str) -> tuple[ShardState, RowCut]:
    ranks = Ranks.alone()
    ranks.rank, ranks.world, ranks.is_parallel = rank, WORLD, True
    cut = RowCut({name: RowsCut(shape, WORLD) for name, shape in SHAPES.items()}, ranks)
    return ShardState(cut, ranks, staged), cut


def whole() -> dict[str, Tensor]:
    found = {f"{name}/mean": torch.arange(float(math.prod(shape))).view(shape) for name, shape in SHAPES.items()}
    found |= {f"{name}/step": torch.tensor(float(index)) for index, name in enumerate(SHAPES)}
    return found | {"a/odd": torch.ones(2, 5), "other/mean": torch.ones(5, 2), "all/b/mean": torch.ones(4)}


def test_a_rank_keeps_its_rows_of_what_has_a_parameters_shape() -> None:
    given = whole()
    for rank in range(WORLD):
        state, cut = state_of(rank)
        own = state.own(given, of_optimizers=True)
        assert own.keys() == given.keys()
        for name in SHAPES:
            assert torch.equal(own[f"{name}/mean"], given[f"{name}/mean"][cut.rows[name].of(rank)])
        for key in ("a/step", "a/odd", "other/mean", "all/b/mean"):
            assert own[key] is given[key]
        # A method's state is named after a parameter anywhere in its name, the longest that fits.
        method = {f"averages/{key}/kept": value for key, value in given.items()} | {"b": given["b/mean"]}
        kept = state.own(method, of_optimizers=False)
        assert torch.equal(kept["averages/all/b/mean/kept"], torch.ones(2))
        assert torch.equal(kept["averages/deep/c/mean/kept"], own["deep/c/mean"])
        assert torch.equal(kept["b"], own["b/mean"])
        assert kept["averages/other/mean/kept"] is given["other/mean"]


def test_of_what_optimizers_stage_whole_only_the_owner_keeps_anything() -> None:
    given = whole()
    for rank in range(WORLD):
        state, cut = state_of(rank, "a", "deep/c")
        own = state.own(given, of_optimizers=True)
        for name in ("a", "deep/c"):
            is_mine = cut.owner_of[name] == rank
            assert (f"{name}/mean" in own, f"{name}/step" in own) == (is_mine, is_mine)
            if is_mine:
                assert own[f"{name}/mean"] is given[f"{name}/mean"]
        assert own["b/mean"].shape == (2,)
        assert own["other/mean"] is given["other/mean"]
        methods = state.own(given, of_optimizers=False)
        assert methods["a/mean"].shape == cut.rows["a"].piece_shape(rank), "a method's are cut as its parameter is"


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("of_optimizers", [True, False])
def test_what_is_held_says_where_it_begins(rank: int, of_optimizers: bool) -> None:
    state, cut = state_of(rank, "deep/c")
    own = state.own(whole(), of_optimizers=of_optimizers)
    held = state.held(own, of_optimizers=of_optimizers)
    rows = held["a/mean"]
    assert (rows.tensor is own["a/mean"], rows.shape, rows.start) == (True, (5, 2), 6 * rank)
    assert (held["b/mean"].shape, held["b/mean"].start) == ((4,), 2 * rank)
    first = {"a/step", "b/step", "a/odd", "other/mean"} | ({"all/b/mean"} if of_optimizers else set())
    assert {key for key in first if key in held} == (first if rank == 0 else set())
    for key in first & held.keys():
        assert (held[key].tensor is own[key], held[key].shape, held[key].start) == (True, tuple(own[key].shape), 0)
    if of_optimizers:
        is_mine = cut.owner_of["deep/c"] == rank
        assert [key in held for key in ("deep/c/mean", "deep/c/step")] == [is_mine, is_mine]
        if is_mine:
            assert (held["deep/c/mean"].shape, held["deep/c/mean"].start) == ((3, 2), 0)
    else:
        assert (held["deep/c/mean"].shape, held["deep/c/mean"].start) == ((3, 2), 4 * rank)
        assert (held["all/b/mean"].shape, held["all/b/mean"].start) == ((4,), 2 * rank)
        assert ("deep/c/step" in held) == (rank == 0)


class Together:
    """What all ranks show each other: the one who asks is one of them, and the others' parts are known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, parts: list[dict[str, Tensor]]) -> None:
        self.rank, self.parts, self.told = rank, parts, list[Any]()
        self.sent: list[tuple[int, Any]] = []
        monkeypatch.setattr(dist, "all_gather_object", self.all_gather_object)
        monkeypatch.setattr(dist, "broadcast", self.broadcast)

    def all_gather_object(self, listed: list[Any], own: Any, group: Any) -> None:
        self.told.append(own)
        for rank, part in enumerate(self.parts):
            listed[rank] = [(key, tuple(v.shape), v.dtype, v.device) for key, v in part.items()]
        self.left = [(rank, value) for rank, part in enumerate(self.parts) for value in part.values()]

    def broadcast(self, value: Tensor, *, group: Any, group_src: int) -> None:
        rank, sent = self.left.pop(0)
        assert rank == group_src
        assert value.is_contiguous()
        if rank == self.rank:
            assert torch.equal(value, sent)
        value.copy_(sent)


@pytest.mark.parametrize("rank", range(WORLD))
def test_owners_show_their_matrices_to_all_in_one_order(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    state, cut = state_of(rank, "a", "deep/c")
    given = whole()
    given["a/mean"] = given["a/mean"].t().contiguous().t()
    assert sorted(cut.owner_of[name] for name in ("a", "deep/c")) == [0, 1], "each has one"
    parts = [
        {key: value for key, value in given.items() if cut.owner_of.get(key.rpartition("/")[0], -1) == one
         and not key.startswith("b")} for one in range(WORLD)
    ]  # fmt: skip
    monkeypatch.setattr(cut, "whole", lambda name, piece: ("whole", name, piece))
    both = Together(monkeypatch, rank, parts)
    own = state.own(given, of_optimizers=True)
    found: Any = state.gathered(own, of_optimizers=True)
    assert both.left == []
    assert both.told == [[(key, tuple(v.shape), v.dtype, v.device) for key, v in parts[rank].items()]]
    assert found.keys() == given.keys()
    for part in parts:
        for key, value in part.items():
            assert torch.equal(found[key], value)
            assert found[key].dtype == value.dtype
    kind, name, piece = found["b/mean"]
    assert (kind, name, piece is own["b/mean"]) == ("whole", "b", True)
    assert found["other/mean"] is own["other/mean"]
    assert found["b/step"] is own["b/step"]


@pytest.mark.parametrize(("staged", "of_optimizers"), [((), True), ((), False), (("a",), False)])
def test_where_nothing_is_staged_nobody_shows_anything(
    monkeypatch: pytest.MonkeyPatch, staged: tuple[str, ...], of_optimizers: bool
) -> None:
    for rank in range(WORLD):
        state, cut = state_of(rank, *staged)
        monkeypatch.setattr(dist, "all_gather_object", None)
        monkeypatch.setattr(cut, "whole", lambda name, piece: name)
        own = state.own(whole(), of_optimizers=of_optimizers)
        found: Any = state.gathered(own, of_optimizers=of_optimizers)
        assert found.keys() == own.keys()
        assert [found[f"{name}/mean"] for name in SHAPES] == list(SHAPES)
        assert found["a/step"] is own["a/step"]
        assert found["a/odd"] is own["a/odd"]
