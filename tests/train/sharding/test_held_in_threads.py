"""What ranks hold of a model together is the whole model, and moves as it would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import CheckpointError, PlanError
from cosmati.train.layout.sharded import Sharded
from cosmati.train.ranks import Ranks
from tests.train.sharding.test_cut_in_threads import (
    ALL,
    NAMES,
    ONES,
    REGIONS,
    Blocks,
    V,
    leaves,
    loss_of,
    pairwise,
    swept,
)
from tests.train.thread_group import on_threads


def test_parameters_and_buffers_come_whole_and_go_in_rows() -> None:
    before = Blocks().state_dict()
    moved = {name: value + 1 for name, value in before.items()}

    def work(ranks: Ranks) -> Any:
        layout = Sharded(Blocks(), REGIONS, ranks, V)
        assert layout.is_cut
        saved = {name: one.clone() for name, one in layout.save()}
        first, held = layout.digest(), layout.held()
        weights = layout.weights()
        own = {name: one.tensor.clone() for name, one in held.items()}
        layout.load(moved)
        for name, tensor in weights.tensors.items():
            assert torch.equal(tensor, moved[name][layout.cut.rows[name].of(ranks.rank)])
        assert torch.equal(layout._model.scale, moved["scale"])
        with pytest.raises(CheckpointError) as told:
            layout.load({**moved, "head.weight": torch.zeros(2, 2)} | {"blocks.0.bias": torch.zeros(3).double()})
        with pytest.raises(CheckpointError) as missing:
            layout.load({n: v for n, v in moved.items() if n != "head.weight"})
        spans = {name: (one.start, one.shape) for name, one in held.items()}
        return saved, first, layout.digest(), own, spans, str(told.value), str(missing.value)

    first, second = on_threads(2, work)
    for saved, was, now, own, spans, told, missing in (first, second):
        assert list(saved) == list(before)
        assert all(torch.equal(saved[name], before[name]) for name in before)
        assert was != now
        assert told == (
            "The checkpoint's weights don't fit the model: blocks.0.bias is torch.float32 (3,), and was "
            "torch.float64 (3,); head.weight is torch.float32 (1, 3), and was torch.float32 (2, 2)."
        )
        assert missing == "The checkpoint's weights don't fit the model: head.weight is missing."
        for name, tensor in own.items():
            start, shape = spans[name]
            assert shape == tuple(before[name].shape)
            assert torch.equal(tensor.flatten(), before[name].flatten()[start : start + tensor.numel()])
    assert (first[1], first[2]) == (second[1], second[2])
    assert set(first[3]) == set(before)
    assert set(second[3]) == set(NAMES)
    assert {name: start for name, (start, _) in second[4].items()} == dict(zip(NAMES, (4, 2, 6, 2, 3), strict=True))


def test_weights_are_other_ones_for_a_while() -> None:
    def work(ranks: Ranks) -> Any:
        layout = Sharded(Blocks(), REGIONS, ranks, V)
        weights = layout.weights()
        before = weights.copied()
        assert weights.regions == REGIONS.region_of
        assert weights.cut is layout.cut
        assert layout.gather(torch.tensor(layout.mine)).tolist() == list(range(V))
        name = NAMES[2]
        with layout.perturbed(weights.only([name]).map(lambda one: torch.full_like(one, 0.5))):
            assert torch.equal(weights.tensors[name], before.tensors[name] + 0.5)
            assert torch.equal(weights.tensors[NAMES[0]], before.tensors[NAMES[0]])
        with pytest.raises(KeyError, match="0"), layout.replaced({name: torch.zeros_like(weights.tensors[name])}):
            raise KeyError(int(weights.tensors[name].count_nonzero()))
        assert all(torch.equal(weights.tensors[n], before.tensors[n]) for n in NAMES)
        return True

    assert on_threads(2, work) == [True, True]


def test_commits_move_rows_and_staged_matrices_alike() -> None:
    whole: dict[str, Any] = dict(Blocks().named_parameters())
    sums = {name: pairwise([leaf[i] for leaf in leaves(ONES)]) for i, name in enumerate(NAMES)}
    wanted = {n: p.detach() - 0.1 * sums[n] if n != NAMES[1] else p.detach() for n, p in whole.items()}

    def work(ranks: Ranks, staged: Sequence[str]) -> Any:
        layout = Sharded(Blocks(), REGIONS, ranks, V)
        layout.stage(staged)
        pieces = dict(layout.pieces())
        for name in staged:
            is_own = layout.cut.owner_of[name] == ranks.rank
            assert pieces[name].shape == whole[name].shape
            assert (pieces[name] == 1).all()
            assert pieces[name].untyped_storage().nbytes() == 4 * (pieces[name].numel() if is_own else 1)
        root = swept(layout, ONES, None, learns=ALL - {1})[0]
        stale = pieces[NAMES[1]]
        stale.grad = torch.ones_like(stale)

        def step() -> None:
            for name, piece in pieces.items():
                is_own = name not in staged or layout.cut.owner_of[name] == ranks.rank
                assert (piece.grad is not None) == (is_own if name != NAMES[1] else True)
                if name != NAMES[1] and piece.grad is not None:
                    piece.data.sub_(0.1 * piece.grad)

        moved = layout.commit(root, ALL - {1}, step)
        alone = layout.commit(root.having({}), frozenset({1}), lambda: None)
        assert stale.grad is None
        state = {f"{name}/momentum": piece.detach() for name, piece in pieces.items() if name not in staged}
        own = layout.own_state(layout.whole_state(state, of_optimizers=False), of_optimizers=False)
        spans = layout.held_state(state, of_optimizers=False)
        assert all(torch.equal(own[key], state[key]) for key in state)
        assert {key: one.start for key, one in spans.items()} == {
            f"{n}/momentum": layout.cut.rows[n].of(ranks.rank).start * layout.cut.rows[n].row_size
            for n in NAMES
            if n not in staged
        }
        return moved, alone, dict(layout.save())

    for staged in ((), NAMES[::2]):
        for moved, alone, saved in on_threads(2, lambda ranks, staged=staged: work(ranks, staged)):
            assert moved == set(NAMES) - {NAMES[1]}
            assert alone == frozenset()
            for name in NAMES:
                torch.testing.assert_close(saved[name], wanted[name], rtol=1e-6, atol=1e-6)


def test_another_parameter_in_the_place_of_one_is_refused() -> None:
    def work(ranks: Ranks) -> str:
        layout = Sharded(Blocks(), REGIONS, ranks, V)
        module: Any = layout._model
        module.head._parameters["weight"] = nn.Parameter(torch.zeros(1, 3))
        with pytest.raises(PlanError) as told, layout.step(ONES, ALL, measure=False):
            pass
        return str(told.value)

    for told in on_threads(2, work):
        assert told.startswith("The model isn't what was planned: head.weight is another tensor.")


def test_weights_are_sent_in_bfloat16_in_a_step_alone() -> None:
    model = Blocks()
    exact = loss_of(model, 0).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    narrow = loss_of(model, 0).detach()
    assert not torch.equal(exact, narrow)

    def work(ranks: Ranks) -> list[Tensor]:
        found = []
        for rounds in (False, True):
            layout = Sharded(Blocks(), REGIONS, ranks, V, rounds=rounds)
            found.append(loss_of(layout._model, 0).detach())
            with layout.step(ONES, ALL, measure=False) as step, step.slot(layout.mine[0]) as slot:
                objective = loss_of(layout._model, 0)
                found.append(objective.detach())
                slot.backward(objective)
            layout.lockstep._expected.clear()
        return found

    for found in on_threads(2, work):
        assert all(map(torch.equal, found, (exact, exact, exact, narrow)))
