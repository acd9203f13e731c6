"""The first look at a step's passes forgives what is installed there, compares ranks and warns; no later one does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.plan import Facts, Plan, Promise, make_plan
from cosmati.routing.regions import partition_parameters
from cosmati.train.forward_watch import ForwardWatch
from cosmati.train.ranks import Ranks


class Apart(Ranks):
    """One of two ranks, of which the other has other numbers and no news."""

    def __init__(self) -> None:
        super().__init__()
        self.is_parallel, self.num_compared = True, 0

    def agree(self, flag: bool) -> bool:
        return flag

    def all_equal(self, digest: bytes) -> bool:
        self.num_compared += 1
        return False

    def unlike_names(self, digests: Mapping[str, bytes]) -> list[str]:
        return sorted(digests)


class Held(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, rows: Tensor) -> Tensor:
        loss: Tensor = model(rows).sum() * self.scale
        return loss


def plan() -> Plan:
    return make_plan([], Facts(num_microbatches=2, rows_per_microbatch=1, positional_data=True))


def watch_of(model: nn.Module, *losses: object, ranks: Ranks | None = None) -> ForwardWatch:
    return ForwardWatch(model, losses, (), partition_parameters(model), ranks or Ranks())


def looked(watch: ForwardWatch, step: int, does: Callable[[], object] = lambda: None) -> Plan:
    """Return what is left of the promises after a step in whose passes something is done."""
    watch.step_begins(step)
    assert watch.is_on
    with watch.around():
        does()
    return watch.judged(plan())


def hook_of(count: float) -> Callable[..., None]:
    def hook(*_: object) -> None:
        assert count >= 0

    return hook


def is_on_after(watch: ForwardWatch, step: int) -> bool:
    watch.step_begins(step)
    return watch.is_on


@pytest.mark.parametrize("path", ["", "0"])
def test_a_hook_that_the_first_pass_installs_is_forgiven_and_looked_at_once_more(path: str) -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    watch = watch_of(model)
    found = looked(watch, 5, lambda: model.get_submodule(path).register_forward_hook(hook_of(1)))
    assert found.holds(Promise.ELASTIC)
    assert found.holds(Promise.RESUME)
    assert not watch.has_moved
    assert looked(watch, 6).holds(Promise.ELASTIC)
    assert not watch.has_moved
    assert not is_on_after(watch, 7)


@pytest.mark.parametrize("has_first", [False, True])
def test_a_hook_that_a_later_pass_installs_is_found(has_first: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    watch, step = watch_of(model), 6 if has_first else 8
    looked(watch, 5, lambda: has_first and model[0].register_forward_hook(hook_of(1)))
    found = looked(watch, step, lambda: model[1].register_forward_hook(hook_of(1)))
    assert watch.has_moved
    for promise in (Promise.ELASTIC, Promise.RESUME):
        assert not found.holds(promise)
    assert "forward changes the attributes 1.(hook).count" in str(found)
    assert not is_on_after(watch, step + 1), "it was judged at once"


def test_what_a_hook_holds_may_be_content_also_in_the_first_pass() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    watch = watch_of(model)
    assert not looked(watch, 5, lambda: model[0].register_forward_hook(hook_of(0.5))).holds(Promise.ELASTIC)
    assert watch.has_moved
    assert not is_on_after(watch, 6)


def test_what_a_first_pass_moves_is_found_at_once() -> None:
    model = nn.BatchNorm1d(2)
    watch = watch_of(model)
    found = looked(watch, 0, lambda: model(torch.randn(4, 2, generator=torch.Generator().manual_seed(0))))
    assert not found.holds(Promise.ELASTIC)
    assert found.holds(Promise.RESUME), "a checkpoint holds buffers"
    assert looked(watch, 1).holds(Promise.ELASTIC), "what was told is told once"


@pytest.mark.parametrize("first", [True, False])
def test_results_that_a_first_pass_caches_are_looked_at_once_more(first: bool) -> None:
    @lru_cache
    def table(size: int) -> Tensor:
        return torch.ones(size)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        result: Tensor = model(rows).sum() * table(len(rows)).sum()
        return result

    model = nn.Linear(2, 1)
    watch, passes = watch_of(model, loss), lambda: loss(model, torch.ones(3, 2))
    assert looked(watch, 5, passes if first else lambda: None).holds(Promise.ELASTIC)
    assert is_on_after(watch, 6) == first
    assert looked(watch, 8, passes).holds(Promise.ELASTIC)
    assert not is_on_after(watch, 9)
    assert not watch.has_moved


def test_ranks_compare_what_they_began_with_and_nothing_later() -> None:
    model, ranks = nn.BatchNorm1d(2), Apart()
    watch = watch_of(model, ranks=ranks)
    found = looked(watch, 0)
    assert "ranks began with unlike values of affine, " in str(found)
    assert not found.holds(Promise.ELASTIC)
    assert ranks.num_compared == 1
    for step in (1, 2, 4):
        assert looked(watch, step).holds(Promise.ELASTIC)
    assert ranks.num_compared == 1


def test_one_rank_alone_has_nobody_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(Ranks, "all_equal", refused)
    assert looked(watch_of(nn.BatchNorm1d(2)), 0).holds(Promise.ELASTIC)


def test_a_gradient_that_no_optimizer_takes_is_told_of_after_the_first_look_alone() -> None:
    model, loss = nn.Linear(2, 1), Held()
    watch = watch_of(model, loss)
    with pytest.warns(
        UserWarning, match=r"Gradients reach loss\.scale, and no optimizer.*put its module into the model"
    ):
        looked(watch, 0, lambda: loss(model, torch.ones(3, 2)).backward())
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        looked(watch, 1, lambda: loss(model, torch.ones(3, 2)).backward())
    assert later == []


@pytest.mark.parametrize("spares", ["no gradient", "frozen", "the model's own"])
def test_where_no_gradient_is_lost_nobody_is_warned(spares: str) -> None:
    loss = Held()
    model = nn.ModuleList([nn.Linear(2, 1), *([loss] if spares == "the model's own" else [])])
    watch = watch_of(model, loss)
    loss.scale.grad = None if spares == "no gradient" else torch.ones(())
    loss.scale.requires_grad_(spares != "frozen")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looked(watch, 0)
    assert not watch.has_moved
