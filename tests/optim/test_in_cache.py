"""A foreach step over a few parameters at a time has the bits of one over all, and nobody sees that it was so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.optim import AdamW
from cosmati.optim import in_cache as few_at_a_time
from cosmati.optim.in_cache import in_cache
from cosmati.train.bare_calls import step_of

Make = Callable[..., torch.optim.Optimizer]
KINDS: list[tuple[Make, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "betas": (0.5, 0.7), "maximize": True}),
]


def trained(make: Make, options: dict[str, Any], sizes: list[int], dtype: torch.dtype, steps: int = 3) -> list[Tensor]:
    """Step two groups, of which one rate changes and each third gradient is absent; return weights and state."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]
    half = len(weights) // 2
    groups = [{"params": weights[:half]}, {"params": weights[half:], "lr": 0.01}]
    optimizer = make([group for group in groups if group["params"]], foreach=True, **options)
    for number in range(steps):
        for index, weight in enumerate(weights):
            drawn = torch.randn(weight.shape, generator=generator).to(dtype)
            weight.grad = None if (index + number) % 3 == 2 else drawn
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        step_of(optimizer)()
    state = [value for w in weights for _, value in sorted(optimizer.state[w].items()) if isinstance(value, Tensor)]
    return [*(weight.detach() for weight in weights), *state]


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=9),
    most=st.sampled_from([1, 16, 50, 200]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_few_at_a_time_has_the_bits_of_all_at_once(
    kind: tuple[Make, dict[str, Any]], sizes: list[int], most: int, dtype: torch.dtype
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_at_a_time, "_ELEMENTS", 1 << 40)
        whole = trained(*kind, sizes, dtype)
        patch.setattr(few_at_a_time, "_ELEMENTS", most)
        few = trained(*kind, sizes, dtype)
    assert len(whole) == len(few)
    for one, other in zip(whole, few, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def groups_within(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Return how many elements parameters have, by group, while it steps."""
    with in_cache(optimizer):
        return [[parameter.numel() for parameter in group["params"]] for group in optimizer.param_groups]


def test_runs_of_parameters_hold_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_at_a_time, "_ELEMENTS", 10)
    sizes = [4, 6, 1, 30, 10, 3, 3, 3, 3]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(size)) for size in sizes], lr=1.0, foreach=True)
    before = optimizer.param_groups
    assert groups_within(optimizer) == [[4, 6], [1], [30], [10], [3, 3, 3], [3]]
    assert optimizer.param_groups is before
    with pytest.raises(KeyError), in_cache(optimizer):
        raise KeyError
    assert optimizer.param_groups is before


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
def test_others_find_the_groups_that_they_had(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(few_at_a_time, "_ELEMENTS", 1)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2)) for _ in range(3)], **options)
    assert groups_within(optimizer) == [[2, 2, 2]]


class Counting(torch.optim.AdamW):
    """Keeps something in its group, as averages of schedules do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


def test_who_keeps_something_in_a_group_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_at_a_time, "_ELEMENTS", 1)
    optimizer = Counting([nn.Parameter(torch.zeros(2)) for _ in range(3)], foreach=True)
    step_of(optimizer)()
    assert optimizer.param_groups[0]["k"] == 1
    assert groups_within(optimizer) == [[2, 2, 2]]


def test_hooks_see_the_groups_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_at_a_time, "_ELEMENTS", 1)
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer, seen = torch.optim.SGD(weights, lr=1.0, foreach=True), []
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(len(one.param_groups)))
    step_of(optimizer)()
    assert seen == [1]


def test_a_run_steps_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_at_a_time, "_ELEMENTS", 16)
    seen: list[int] = []
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # PyTorch puts its wrapper on with the first one
    step = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

    def counted(optimizer: torch.optim.Optimizer) -> None:
        seen.append(len(optimizer.param_groups))
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW.step, "__wrapped__", counted)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    data = InMemory((torch.randn(8, 4), torch.randint(3, (8,))), 4)
    config = RunConfig(budget="2ba", num_threads=None)
    Trainer(model, Classification(3), data, optimizers=[AdamW(lr=0.1)], config=config).fit()
    assert seen == [4, 4]  # of 20, 5, 15 and 3 elements
