"""What code that talks to other ranks takes back of the promises, and who is refused before he waits for nobody."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed import broadcast as spread

from cosmati.core.meetings import MetAloneError, may_meet
from cosmati.core.plan import Facts, Guarantee, Plan, Promise
from cosmati.errors import PlanError
from cosmati.train import collectives
from cosmati.train.collectives import (
    refuse_unmet,
    run_alike,
    unmet,
    without_late_hooks,
    without_met,
    without_named,
)
from cosmati.train.ranks import Ranks

PAIR = ("bound", "head")


def plan(num: int = 2, *, parity: bool = True) -> Plan:
    """Everything is promised; isolation of one pair, and not of another."""
    facts = Facts(num_microbatches=num, rows_per_microbatch=3, positional_data=True)
    held = [
        Guarantee(one, parity or one is not Promise.PARITY, "at first")
        for one in Promise
        if one is not Promise.ISOLATED
    ]
    of_pairs = [
        Guarantee(Promise.ISOLATED, holds, "at first", pair) for pair, holds in ((PAIR, True), (PAIR[::-1], False))
    ]
    return Plan((), (*held, *of_pairs), facts)


def broken(found: Plan) -> dict[str, str]:
    return {one.name: one.because for one in found.guarantees if not one.holds and one.because != "at first"}


class Say(Ranks):
    """Several ranks, of which another may say yes."""

    def __init__(self, world: int = 2, *, others: bool = False, has_met: bool = False) -> None:
        super().__init__()
        self.world, self.is_parallel, self.has_met, self.others = world, world > 1, has_met, others
        self.asked: list[bool] = []

    def agree(self, flag: bool) -> bool:
        self.asked.append(flag)
        return flag or self.others


def one_rank() -> Ranks:
    return Say(1)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).sum()


def reduces(model: nn.Module, rows: Tensor) -> Tensor:
    total = model(rows).sum()
    dist.all_reduce(total)
    return total


def reduces_by_name(_: nn.Module, rows: Tensor) -> Tensor:
    all_reduce(rows)
    return rows


def reduces_by_path(_: nn.Module, rows: Tensor) -> Tensor:
    torch.distributed.all_gather([], rows)
    return rows


def spreads(_: nn.Module, rows: Tensor) -> Tensor:
    spread(rows)
    return rows


def gathers_rows(_: nn.Module, rows: Tensor) -> Tensor:
    return torch.gather(rows, 0, rows.long())


def send(rows: Tensor) -> Tensor:
    return rows


def sends_to_its_own(_: nn.Module, rows: Tensor) -> Tensor:
    dist.get_rank()
    return send(rows)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (loss, []),
        (reduces, ["all_reduce()"]),
        (reduces_by_name, ["all_reduce()"]),
        (reduces_by_path, ["all_gather()"]),
        (spreads, []),
        (gathers_rows, []),
        (sends_to_its_own, []),
    ],
)
def test_collectives_are_known_by_name_and_by_whose_they_are(function: types.FunctionType, named: list[str]) -> None:
    assert collectives._collectives_in(function) == named


@pytest.mark.parametrize(
    "word", ["reduce", "gather", "scatter", "broadcast", "all_to_all", "send", "recv", "permute_tensor"]
)
def test_each_kind_of_collective_is_known(word: str) -> None:
    space: dict[str, Any] = {"dist": dist}
    exec(f"def own(x):\n    dist.my_{word}_single(x)", space)
    assert collectives._collectives_in(space["own"]) == [f"my_{word}_single()"]


def test_whose_a_module_is() -> None:
    assert collectives._is_distributed("torch.distributed.nn")
    assert not collectives._is_distributed("torch")
    assert not collectives._is_distributed(None)


@pytest.mark.parametrize("world", [1, 2])
def test_named_collectives_take_back_what_follows_from_the_ranks(world: int) -> None:
    ranks = Say(world)
    found = broken(without_named(plan(), nn.Linear(2, 1), [loss, reduces, reduces_by_path], ranks, ()))
    both = {"elastic", "parity", "no_direct_write", "isolated(bound, head)"}
    assert set(found) == (both if world > 1 else {"elastic"})
    assert ranks.has_met == (world > 1)
    assert found["elastic"] == (
        "model or loss call all_gather(), all_reduce(): what they compute follows from the number of ranks, and from "
        "what each has. Leave the ranks' sharing to the trainer"
    )
    assert len(set(found.values())) == 1


def test_nothing_named_leaves_the_plan_and_what_is_known() -> None:
    for has_met in (False, True):
        ranks = Say(2, has_met=has_met)
        assert without_named(plan(), nn.Linear(2, 1), [loss], ranks, ()) == plan()
        assert ranks.has_met is has_met


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows) - self.norm.running_mean + self.norm.running_var


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows) + sum(one.sum() for one in self.buffers())


@pytest.mark.parametrize(
    ("model", "what"), [(Reads, "running_mean, running_var"), (Lists, "buffers()"), (nn.Identity, "")]
)
def test_who_reads_statistics_that_move_at_the_commit_has_no_parity(model: Callable[[], nn.Module], what: str) -> None:
    def told(given: Plan, folded: Sequence[str]) -> dict[str, str]:
        return broken(without_named(given, model(), [loss], one_rank(), folded))

    assert told(plan(), ()) == {}
    assert told(plan(1), ["norm"]) == {}
    assert told(plan(parity=False), ["norm"]) == {}
    found = told(plan(), ["norm"])
    assert set(found) == ({"parity"} if what else set())
    if what:
        assert found["parity"].startswith(f"model or loss read {what}, which the microbatches of a step move together")


def test_hooks_that_see_sums_before_they_are_whole_take_back_two_promises() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert without_late_hooks(plan(), model) == plan()
    model[0].bias.register_post_accumulate_grad_hook(lambda _: None)
    model[1].bias.register_post_accumulate_grad_hook(lambda _: None)
    found = broken(without_late_hooks(plan(), model))
    assert set(found) == {"elastic", "parity"}
    assert all(why.startswith("0.bias has a hook (register_post_accumulate_grad_hook)") for why in found.values())
    assert without_late_hooks(plan(1), model) == plan(1)
    assert set(broken(without_late_hooks(plan(parity=False), model))) == {"elastic"}
    assert broken(without_named(plan(), model, [loss], one_rank(), ())) == found


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("has_met", [False, True])
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_where_ranks_have_met_all_take_back_the_same(is_on: bool, has_met: bool, others: bool, world: int) -> None:
    ranks = Say(world, others=others, has_met=has_met)
    found = broken(without_met(plan(), ranks, is_on=is_on))
    assert ranks.asked == ([has_met] if is_on and world > 1 else [])
    assert bool(found) == (is_on and world > 1 and (has_met or others))
    assert all(
        why.startswith("model, loss or a hook call collectives of torch.distributed: ") for why in found.values()
    )


def dealt(world: int, *, is_strided: bool = False) -> Ranks:
    ranks = Ranks.alone()
    ranks.world = world
    ranks.share_out(4, is_strided=is_strided)
    return ranks


def test_microbatches_that_only_some_ranks_run_are_named() -> None:
    offered = [True, False, True, True]
    assert dealt(2).slots(4) == [[0, 2], [1, 3]]
    assert unmet(dealt(2), offered) == {3}
    assert unmet(dealt(2, is_strided=True), offered) == {0}
    assert unmet(dealt(4), offered) == {0, 2, 3}
    assert unmet(dealt(1), offered) == frozenset()
    assert unmet(dealt(2), [True] * 4) == unmet(dealt(2), [False] * 4) == frozenset()
    ranks = dealt(2)
    ranks.in_lockstep = True
    assert unmet(ranks, offered) == frozenset()


def test_who_would_wait_for_ever_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^Model, loss or a hook call collectives of torch\.distributed, and in this"):
        refuse_unmet()


class TestBeforeAStep:
    """The first of two ranks runs microbatches 0 and 1, the other 2 and 3, which has none of number 3."""

    OFFERED = (True, True, True, False)

    @staticmethod
    def ranks(**changed: Any) -> Say:
        ranks = Say(2, **changed)
        ranks.share_out(4)
        return ranks

    @staticmethod
    def looks() -> bool:
        return may_meet()

    @pytest.mark.parametrize("runs_model", [False, True])
    def test_who_runs_alone_may_meet_nobody(self, runs_model: bool) -> None:
        ranks = self.ranks()
        found = run_alike(ranks, self.OFFERED, [self.looks, self.looks], runs_model=runs_model)
        assert found == ([True, not runs_model], None)
        assert ranks.asked == ([False] if runs_model else [])
        assert run_alike(ranks, [True] * 4, [self.looks] * 2, runs_model=True) == ([True, True], None)
        assert len(ranks.asked) == runs_model

    def test_who_meets_alone_is_refused_on_all_ranks(self) -> None:
        def meets() -> bool:
            raise MetAloneError

        for own, others in (([self.looks, meets], False), ([self.looks] * 2, True)):
            ranks = self.ranks(others=others)
            with pytest.raises(PlanError, match="call collectives"):
                run_alike(ranks, self.OFFERED, own, runs_model=True)
            assert ranks.asked == [own[1] is meets]
        ran: list[int] = []
        with pytest.raises(PlanError, match="call collectives"):
            run_alike(self.ranks(has_met=True), self.OFFERED, [lambda: ran.append(1)] * 2, runs_model=False)
        assert ran == []
        assert run_alike(self.ranks(has_met=True), [True] * 4, [self.looks] * 2, runs_model=True)[1] is None

    def test_what_fails_ends_this_ranks_own_and_is_told(self) -> None:
        ran: list[int] = []

        def fails() -> int:
            ran.append(0)
            raise ZeroDivisionError

        ranks = self.ranks()
        found, failure = run_alike(ranks, self.OFFERED, [fails, lambda: ran.append(1)], runs_model=True)  # type: ignore[list-item, return-value]
        assert (found, type(failure), ran) == ([], ZeroDivisionError, [0])
        assert ranks.asked == [False], "others ask"
        ranks = self.ranks(has_met=True)
        with pytest.raises(ZeroDivisionError):
            run_alike(ranks, [True] * 4, [fails, fails], runs_model=True)

    def test_each_of_its_microbatches_has_one(self) -> None:
        with pytest.raises(ValueError, match=re.escape("zip()")):
            run_alike(self.ranks(), self.OFFERED, [self.looks], runs_model=True)
