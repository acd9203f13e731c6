"""What FSDP2 gathers is seen as it is gathered: who freezes it, writes to it, or differentiates past a slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.train.layout import sharded_step
from cosmati.train.layout.shard_groups import ShardGroup
from tests.train.sharding.held_whole import NAMES, HandMade, loss_of, rows, swept


@pytest.fixture(autouse=True)
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, object]]:
    """One process has nobody to ask."""
    asked = list[tuple[Tensor, object]]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: asked.append((tensor.clone(), op)))
    return asked


def test_outside_of_a_slot_nothing_is_noted() -> None:
    layout = HandMade()
    layout.model.one.register_forward_hook(lambda module, *_: module.bias.data.add_(1))
    with torch.no_grad():
        layout.model.two.bias.add_(1)
    loss_of(layout.model, 0).backward()
    assert layout.arrivals.gathered == {}
    assert layout.arrivals._arrived(0, torch.ones(2)) is None
    layout.arrivals._leaves(layout.groups[0], torch.ones(2))


def test_without_a_graph_weights_are_looked_at_and_nothing_arrives() -> None:
    layout = HandMade()
    with layout.step((1.0, 1.0)).slot(0) as slot, torch.no_grad():
        loss_of(layout.model, 0)
        assert (slot.run, layout.arrivals.gathered) == (set(), {})


def test_a_parameter_is_hooked_once_as_long_as_it_is_the_same() -> None:
    layout = HandMade()
    step = layout.step((1.0, 1.0), (1.0, 1.0))
    for m in range(2):
        with step.slot(m) as slot:
            slot.backward(loss_of(layout.model, m))
            assert slot.run == {0, 1}
            layout.sum_up(step, slot)
        assert layout.arrivals.gathered == dict(layout.model.named_parameters())
    layout.model.one.bias = nn.Parameter(torch.zeros(3))
    step = layout.step((1.0, 0.5))
    with step.slot(0) as slot:
        slot.backward(loss_of(layout.model, 0))
        layout.sum_up(step, slot)
    assert layout.arrivals.gathered["one.bias"] is layout.model.one.bias
    assert step.present.tolist() == [1] * 4


def test_frozen_parameters_are_gathered_by_nobody() -> None:
    layout = HandMade(frozen=["one.weight"])
    step = layout.step((1.0, 1.0), learns=frozenset(range(3)))
    swept(layout, step, [0])
    assert list(layout.arrivals.gathered) == list(NAMES[1:])
    assert step.root(None).names == NAMES[1:]


@pytest.mark.parametrize(
    ("write", "since", "is_seen"),
    [
        (lambda bias: bias.add_(1), 0, True),
        (lambda bias: bias.add_(1), 1, True),
        (lambda bias: bias.data.add_(1), 0, True),
        (lambda bias: bias.data.add_(1), 1, False),
    ],
    ids=["counted", "counted later", "past autograd", "past autograd later"],
)
def test_writes_to_gathered_weights_are_refused_past_autograd_in_the_first_pass(
    write: Callable[[Tensor], object], since: int, is_seen: bool
) -> None:
    layout, passes = HandMade(frozen=["one.bias"]), list[int]()

    def writing(module: Any, *_: Any) -> None:
        passes.append(1)
        if len(passes) > since:
            with torch.no_grad():
                write(module.bias)

    layout.model.one.register_forward_hook(writing, prepend=True)
    step = layout.step((1.0, 1.0), (1.0, 1.0), learns=frozenset(range(3)))
    said = r"^The forward pass changes one\.bias, and sharding='full' gathers it for the pass alone"
    with pytest.raises(PlanError, match=said) if is_seen else nullcontext():
        swept(layout, step, range(2))
    assert len(passes) == (since + 1 if is_seen else 2)


def test_what_an_optimizer_writes_between_passes_is_no_write_of_theirs() -> None:
    layout = HandMade()
    for m in range(2):
        step = layout.step((1.0, 1.0), (1.0, 1.0))
        swept(layout, step, [m])
        with torch.no_grad():
            for parameter in layout.model.parameters():
                parameter.add_(1)
    assert layout.arrivals.slot is None


def test_a_block_ends_as_its_inputs_gradient_leaves_it() -> None:
    layout, filled = HandMade(), list[tuple[int, bool]]()
    step = layout.step((1.0, 1.0))
    with step.slot(0) as slot:
        own = slot.fill

        def fill(group: ShardGroup) -> None:
            filled.append((group.number, layout.model.one.weight.grad is not None))
            own(group)

        slot.fill = fill  # type: ignore[method-assign]
        slot.backward(loss_of(layout.model, 0))
    assert filled == [(1, False), (0, True), (1, True)], "the second as its input's gradient comes, then all"


def test_a_backward_of_the_loss_s_own_is_refused() -> None:
    layout, given = HandMade(), rows(0).requires_grad_()
    said = r"^The loss differentiates through the model by itself"
    with pytest.raises(PlanError, match=said), layout.step((1.0, 1.0)).slot(0):
        torch.autograd.grad(layout.model(given).sum(), given)


def test_inputs_that_fsdp_hands_on_are_kept_until_somebody_has_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, asked = HandMade(), list[Mapping[str, Any]]()
    monkeypatch.setattr(sharded_step, "is_node_of_fsdp", lambda tensor: tensor.shape == (3, 3))

    def regrouped(objective: Tensor, inputs: list[tuple[int, Tensor]]) -> set[int]:
        asked.append({"numbers": [number for number, _ in inputs], "objective": objective.item()})
        return set() if len(asked) == 1 else {1, 0}

    monkeypatch.setattr(sharded_step, "regrouped", regrouped)
    step = layout.step((1.0, 1.0), (1.0, 1.0))
    swept(layout, step, range(2))
    assert [one["numbers"] for one in asked] == [[1]]
    assert layout.arrivals._inputs == []
    other = HandMade()
    with pytest.raises(PlanError, match=r"^The block of one\.weight reads an input several times, and others read it"):
        swept(other, other.step((1.0, 1.0)), [0])
