"""A module runs once for each group of tokens, and each token gets what its own group's run gave it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.routing import split_forward
from cosmati.routing.split_forward import (
    ALONE,
    TokenGroup,
    groups_of,
    run_apart,
)
from cosmati.routing.token_layers import TokenMask

SHAPE = torch.Size([2, 3])


def groups_by(*lines: Sequence[Sequence[int]]) -> list[TokenGroup]:
    """Return a group for each table of zeros and ones."""
    return [TokenGroup(torch.tensor(line).bool(), {}) for line in lines]


TWO = groups_by([[1, 0, 0], [0, 1, 1]], [[0, 1, 1], [1, 0, 0]])
THREE = groups_by([[1, 0, 0], [0, 1, 0]], [[0, 1, 0], [0, 0, 1]], [[0, 0, 1], [1, 0, 0]])


class Told:
    """Gives one output after another, whatever the group."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs, self.groups = outputs, list[TokenGroup]()

    def __call__(self, group: TokenGroup) -> Any:
        self.groups.append(group)
        return self.outputs[len(self.groups) - 1]


def apart(groups: Sequence[TokenGroup], run: Callable[[TokenGroup], Any], given: Any = (), **options: Any) -> Any:
    return run_apart(nn.Module(), groups, run, given, "some.block", **options)


def learnt(value: float, *more: int) -> Tensor:
    """Return an output [rows, tokens, ...] that is learnt, of one number."""
    return torch.full((*SHAPE, *more), value, requires_grad=True)


# ------------------------------------------------------------------------------------------------------------- groups


def test_each_token_is_in_the_one_group_of_its_weights() -> None:
    weights = torch.tensor([[[0.0, 1, 0.25], [1, 0, 0.25]], [[1.0, 1, 1], [1, 1, 1]], [[0.0, 0, 0.5], [0.5, 0, 0]]])
    masks = [TokenMask.of(one) for one in weights]
    groups = groups_of(masks)
    assert torch.stack([group.members for group in groups]).sum(0).eq(1).all()
    assert len(groups) == len({tuple(weights[:, row, token].tolist()) for row in range(2) for token in range(3)})
    for group in groups:
        assert group.members.dtype is torch.bool
        assert group.members.shape == SHAPE
        for mask, line in zip(masks, weights, strict=True):
            assert (line[group.members] == group.weights[id(mask)]).all()


def test_one_mask_makes_groups_of_its_own_weights() -> None:
    mask = TokenMask.of(torch.tensor([[0.0, 1.0, 0.0]]))
    found = {group.weights[id(mask)]: group.members.tolist() for group in groups_of([mask])}
    assert found == {0.0: [[True, False, True]], 1.0: [[False, True, False]]}


def test_weights_of_any_type_are_told_in_double() -> None:
    scale = torch.tensor([[0.1, 0.0]], dtype=torch.float64)
    mask, plain = TokenMask(scale != 0, scale), TokenMask(torch.tensor([[True, True]]))
    found = [[group.weights[id(mask)], group.weights[id(plain)]] for group in groups_of([mask, plain])]
    assert sorted(found) == [[0.0, 1.0], [0.1, 1.0]]


# ------------------------------------------------------------------------------------------------------------ the runs


def test_each_token_gets_what_its_own_run_gave() -> None:
    outputs = [learnt(float(index)) for index in range(3)]
    run = Told(*outputs)
    found = apart(THREE, run)
    assert found.tolist() == [[0, 1, 2], [2, 0, 1]]
    assert [id(one) for one in run.groups] == [id(one) for one in THREE]
    found.sum().backward()
    for output, group in zip(outputs, THREE, strict=True):
        assert output.grad is not None
        assert torch.equal(output.grad, group.members.float())


def test_a_nest_is_taken_tensor_by_tensor_and_what_is_not_learnt_is_the_last_ones() -> None:
    told = [
        {"deep": (learnt(index, 2), [learnt(-index, 2, 2)]), "plain": torch.full((2, 3), index), "name": index}
        for index in (1.0, 2.0)
    ]
    found = apart(TWO, Told(*told))
    first, (second,) = found["deep"]
    expected = torch.tensor([[1.0, 2, 2], [2, 1, 1]])
    assert torch.equal(first, expected[..., None].expand(2, 3, 2))
    assert torch.equal(second, -expected[..., None, None].expand(2, 3, 2, 2))
    assert torch.equal(found["plain"], torch.full((2, 3), 2.0))
    assert found["name"] == 2.0


def test_one_group_gives_whatever_it_gives() -> None:
    output = torch.ones((), requires_grad=True)
    all_of_them = groups_by([[1, 1, 1], [1, 1, 1]])
    assert apart(all_of_them, Told(output)) is output
    plain = torch.zeros(2, 3)
    assert apart(all_of_them, Told(plain), reads_alike=False) is plain


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_learnt_and_is_not_of_tokens_cannot_be_merged(which: int) -> None:
    outputs = [learnt(1.0), learnt(1.0)]
    outputs[which] = torch.ones((), requires_grad=True)
    run = Told(*((learnt(0.0), one) for one in outputs))
    assert apart(TWO, run) is None
    assert len(run.groups) == which + 1, "no further run is needed"
    assert apart(TWO, Told(*((learnt(0.0), torch.ones(())) for _ in range(2)))) is not None


def test_runs_that_read_other_numbers_are_merged_in_what_is_not_learnt_too() -> None:
    def told(value: float, beside: float) -> tuple[Tensor, Tensor, Tensor]:
        return learnt(value), torch.full((2, 3, 2), value), torch.full((3,), beside)

    expected = torch.tensor([[1.0, 2, 2], [2, 1, 1]])
    one, other, beside = apart(TWO, Told(told(1.0, 5.0), told(2.0, 5.0)), reads_alike=False)
    assert torch.equal(one, expected)
    assert torch.equal(other, expected[..., None].expand(2, 3, 2))
    assert beside.tolist() == [5.0] * 3
    alike = apart(TWO, Told(told(1.0, 5.0), told(2.0, 6.0)))
    assert torch.equal(alike[1], torch.full((2, 3, 2), 2.0)), "told to read alike, it isn't looked at"
    assert alike[2].tolist() == [6.0] * 3
    assert apart(TWO, Told(told(1.0, 5.0), told(2.0, 6.0)), reads_alike=False) is None
    assert apart(THREE, Told(*(told(1.0, beside) for beside in (5.0, 5.0, 6.0))), reads_alike=False) is None


@pytest.mark.parametrize(
    "outputs",
    [
        ((torch.zeros(2, 3),), (torch.zeros(2, 3), torch.zeros(2, 3))),
        ((torch.zeros(2, 3),), (torch.zeros(3, 3),)),
        ((torch.zeros(3, 3),), (torch.zeros(2, 3),)),
        ((torch.zeros(2, 3), torch.zeros(3)), (torch.zeros(2, 3), torch.zeros(3, 1))),
    ],
    ids=["one more", "first of tokens", "last of tokens", "another shape"],
)
def test_runs_that_give_otherwise_than_each_other_are_not_merged(outputs: tuple[Any, Any]) -> None:
    assert apart(TWO, Told(*outputs), reads_alike=False) is None


def test_a_module_that_changes_what_it_is_given_is_refused_by_name() -> None:
    def run_on(given: Any) -> Callable[[TokenGroup], Tensor]:
        def run(_: TokenGroup) -> Tensor:
            given["deep"][1].add_(1)
            return learnt(0.0)

        return run

    given = {"deep": [torch.zeros(2), torch.zeros(2)]}
    said = r"^some\.block changes in place what it is given, .* once for each route.*\. Let it change a copy .*inplace"
    with pytest.raises(PlanError, match=said):
        apart(TWO, run_on(given), given)
    assert given["deep"][1].tolist() == [1.0, 1.0], "it's told after the first run"
    with pytest.raises(PlanError, match=r"^The model changes in place"):
        run_apart(nn.Module(), TWO, run_on(given), given, "")


def test_a_module_that_waits_for_other_ranks_is_refused_before_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = [0, 7]
    run = Told(learnt(0.0), learnt(1.0))

    def running(group: TokenGroup) -> Any:
        met[1] += 1
        return run(group)

    monkeypatch.setattr(split_forward, "num_collectives", lambda: list(met))
    with pytest.raises(PlanError) as refused:
        apart(TWO, running)
    assert str(refused.value) == f"some.block {ALONE}"
    assert len(run.groups) == 1
    with pytest.raises(PlanError, match=r"^The model calls collectives"):
        run_apart(nn.Module(), TWO, running, (), "")
    alone = Told(learnt(0.0))
    run = alone
    assert apart(groups_by([[1, 1, 1], [1, 1, 1]]), running) is alone.outputs[0], "every rank runs it once, as always"


# -------------------------------------------------------------------------------------------------- draws and buffers


class Counting(nn.Module):
    """Draws, and counts in buffers of its own and of a part's; another is none."""

    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("empty", None)

    def forward(self, *, is_bad: bool = False) -> Tensor:
        self.runs += 1
        assert self.part.num_batches_tracked is not None
        self.part.num_batches_tracked = self.part.num_batches_tracked + 1
        self.part.running_mean = None
        self.empty = torch.ones(1)
        self.register_buffer("late", torch.ones(1), persistent=False)
        if is_bad:
            raise ArithmeticError
        return torch.rand(2, 3) * self.runs


@pytest.fixture
def counting() -> Iterator[Counting]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield Counting()


def test_draws_and_buffers_are_those_of_the_last_run_alone(counting: Counting) -> None:
    found = list[Tensor]()
    buffer, mean = counting.runs, counting.part.running_mean
    seen = list[tuple[float, bool, bool]]()

    def run(_: TokenGroup) -> Tensor:
        seen.append((counting.runs.item(), counting.empty is None, counting.part.running_mean is None))
        assert len(found) == 2 or counting.runs is not buffer, "only the last run has the module's own"
        found.append(counting())
        return found[-1].clone().requires_grad_()

    run_apart(counting, THREE, run, (), "it")
    torch.manual_seed(3)
    expected = torch.rand(2, 3)
    assert all(torch.equal(one, expected) for one in found)
    assert seen == [(0.0, True, False)] * 3
    assert counting.runs is buffer
    assert counting.runs == 1
    assert counting.part.num_batches_tracked == 1
    assert counting.part.running_mean is None
    assert mean is not None
    assert counting.late is not None


@pytest.mark.parametrize("how", ["not of tokens", "raises"])
def test_a_module_that_cannot_run_apart_keeps_draws_and_buffers(counting: Counting, how: str) -> None:
    kept = dict(counting._buffers), dict(counting.part._buffers)

    def run(_: TokenGroup) -> Tensor:
        total: Tensor = counting(is_bad=how == "raises").sum()
        return total.requires_grad_()

    if how == "raises":
        with pytest.raises(ArithmeticError):
            run_apart(counting, TWO, run, (), "it")
    else:
        assert run_apart(counting, TWO, run, (), "it") is None
    for part, names in zip((counting, counting.part), kept, strict=True):
        assert list(part._buffers) == list(names)
        assert all(part._buffers[name] is one for name, one in names.items())
    assert counting.runs == 0
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))
