"""Norms by region are the roots of sums of squares by hand, and a hook stands only from `before` to `end`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from cosmati.core.clock import Clock
from cosmati.errors import PlanError
from cosmati.train.observers.monitors import norms
from cosmati.train.observers.monitors.norms import GradientNorms, LearningRates, UpdateNorms, parameter_groups
from tests.train.hand_made import outcome


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks)


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    found = dict(torch_optimizer._global_optimizer_pre_hooks)
    yield
    torch_optimizer._global_optimizer_pre_hooks.clear()
    torch_optimizer._global_optimizer_pre_hooks.update(found)


def run_of(
    *names: str, regions: Sequence[str] = ("all",), parts: Sequence[Sequence[str]] | None = None
) -> tuple[Any, dict[str, nn.Parameter]]:
    """A run whose parameters have these names; number n holds n + 1 twice."""
    held = {name: nn.Parameter(torch.full((2,), float(number + 1))) for number, name in enumerate(names)}
    model = SimpleNamespace(named_parameters=held.items)
    facts = SimpleNamespace(regions=tuple(regions), parameters=tuple(map(tuple, parts or [names])))
    return SimpleNamespace(model=model, facts=facts), held


def named(run: Any, held: dict[str, nn.Parameter]) -> dict[str, list[str]]:
    of = {id(parameter): name for name, parameter in held.items()}
    return {group: [of[id(p)] for p in own] for group, own in parameter_groups(run).items()}


def test_the_regions_of_a_policy_are_the_groups_in_their_order() -> None:
    run, held = run_of("a.weight", "b.weight", "b.bias", regions=("high", "low"), parts=(["b.weight"], ["a.weight"]))
    assert named(run, held) == {"high": ["b.weight"], "low": ["a.weight"]}, "what is frozen is in no region"
    assert list(parameter_groups(run)) == ["high", "low"]


def test_each_region_needs_its_parameters() -> None:
    run, _ = run_of("a.weight", "b.weight", regions=("high", "low"), parts=(["b.weight"],))
    with pytest.raises(ValueError, match="zip"):
        parameter_groups(run)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["a.weight", "a.bias", "b.weight"], {"a": ["a.weight", "a.bias"], "b": ["b.weight"]}),
        (["net.a.weight", "net.b.weight"], {"net.a": ["net.a.weight"], "net.b": ["net.b.weight"]}),
        (["net.body.a.w", "net.body.b.w"], {"net.body.a": ["net.body.a.w"], "net.body.b": ["net.body.b.w"]}),
        (["o.p.q.a.w", "o.p.q.b.w"], {"o.p.q.a": ["o.p.q.a.w"], "o.p.q.b": ["o.p.q.b.w"]}),
        # No deeper than four.
        (["n.o.p.q.a.w", "n.o.p.q.b.w"], {"n.o.p.q": ["n.o.p.q.a.w", "n.o.p.q.b.w"]}),
        (["a.weight", "a.bias"], {"a": ["a.weight", "a.bias"]}),
        (["weight", "bias"], {"weight": ["weight"], "bias": ["bias"]}),
        (["scale", "net.a.w", "net.b.w"], {"scale": ["scale"], "net": ["net.a.w", "net.b.w"]}),
        ([], {}),
    ],
)
def test_without_a_policy_parts_are_told_apart_where_names_first_differ(
    names: list[str], groups: dict[str, list[str]]
) -> None:
    run, held = run_of(*names)
    assert named(run, held) == groups


def test_parts_are_of_what_learns_only() -> None:
    run, held = run_of("a.w", "b.w", "c.w", parts=[["c.w", "a.w"]])
    assert named(run, held) == {"c": ["c.w"], "a": ["a.w"]}


@pytest.mark.parametrize("number", [0, 1])
def test_parameters_of_which_each_rank_holds_a_part_are_refused(number: int) -> None:
    run, held = run_of("a.weight", "b.weight")
    held[list(held)[number]] = SimpleNamespace(detach=lambda: SimpleNamespace(to_local=None))  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"sharding='full' each rank holds a part of each\. Leave them out"):
        parameter_groups(run)


@pytest.mark.parametrize(("depth", "part"), [(1, "a"), (2, "a.b"), (3, "a.b.c"), (4, "a.b.c")], ids=str)
def test_a_part_is_so_much_of_the_name_of_the_layer(depth: int, part: str) -> None:
    assert norms._part("a.b.c.weight", depth) == part
    assert norms._part("weight", depth) == "weight"


def by_hand(tensor: Tensor) -> float:
    return math.sqrt(sum(abs(value) ** 2 for value in tensor.reshape(-1).tolist()))


def test_norms_are_the_roots_of_the_sums_of_squares_of_whatever_kind() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (3,), check_invariants=True
    )
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[3 + 4j, 12j]]), torch.tensor(-2.0), sparse]
    found = norms._norms(tensors)
    assert found.dtype is torch.float32
    assert found.tolist() == pytest.approx([5.0, 13.0, 2.0, 5.0])


def test_one_of_double_precision_makes_all_norms_so() -> None:
    tiny = torch.tensor([0.1, 0.2], dtype=torch.float64)
    found = norms._norms([torch.ones(2), tiny])
    assert found.dtype is torch.float64
    assert found[1].item() == by_hand(tiny)
    assert norms._norms([torch.ones(2)]).dtype is torch.float32
    wide = norms._norms([torch.full((3,), 300.0, dtype=torch.float16)])
    assert (wide.dtype, wide.item()) == (torch.float32, pytest.approx(300 * 3**0.5)), "which is squared in more"


def test_a_region_has_the_norm_of_all_its_tensors() -> None:
    found = norms._joined("what", ["a", "b", "a", "c"], [3.0, 2.0, 4.0, 0.0])
    assert found == {"what/a": 5.0, "what/b": 2.0, "what/c": 0.0}
    assert list(found) == ["what/a", "what/b", "what/c"]
    assert norms._joined("what", [], []) == {}
    with pytest.raises(ValueError, match="zip"):
        norms._joined("what", ["a"], [1.0, 2.0])
    with pytest.raises(AssertionError, match="of one dimension"):
        norms._joined("what", ["a"], 1.0)


def test_learning_rates_are_numbered_by_optimizer() -> None:
    monitor = LearningRates()
    assert monitor.measure(outcome(0, learning_rates=(0.5, 0.25))) == {"learning_rate/0": 0.5, "learning_rate/1": 0.25}
    assert monitor.measure(outcome(0)) == {}


def opened() -> tuple[GradientNorms, dict[str, nn.Parameter]]:
    run, held = run_of("a.weight", "a.bias", "b.weight", "frozen.weight", parts=[["a.weight", "a.bias", "b.weight"]])
    for number, parameter in enumerate(held.values()):
        parameter.grad = torch.tensor([3.0, 4.0]) * (number + 1)
    monitor = GradientNorms()
    monitor.open(run)
    return monitor, held


def judged(monitor: GradientNorms) -> dict[str, float]:
    found: Any = monitor.measure(outcome(0))
    return dict(monitor.judge({name: value.tolist() for name, value in found.items()}, outcome(0)))


def test_gradients_are_seen_as_an_optimizer_steps_and_only_between_before_and_end() -> None:
    monitor, held = opened()
    sgd, none = torch.optim.SGD(held.values(), lr=0.0), hooks()
    sgd.step()
    assert monitor.measure(outcome(0)) == {}
    assert monitor.judge({}, outcome(0)) == {}
    monitor.before(Clock(), 1)
    assert hooks() == none + 1
    sgd.step()
    assert judged(monitor) == pytest.approx({"gradient_norm/a": math.sqrt(5**2 + 10**2), "gradient_norm/b": 15.0})
    monitor.end()
    assert hooks() == none
    sgd.step()
    assert monitor.measure(outcome(1)) == {}


def test_a_hook_stands_once_however_often_it_gets_ready() -> None:
    monitor, _ = opened()
    none = hooks()
    monitor.end()  # where nothing was begun
    monitor.before(Clock(), 1)
    monitor.before(Clock(), 2)
    assert hooks() == none + 1
    monitor.end()
    monitor.end()
    assert hooks() == none


def test_gradients_are_those_of_several_optimizers_and_of_their_groups() -> None:
    monitor, held = opened()
    parameters = list(held.values())
    one = torch.optim.SGD([{"params": parameters[1:2]}, {"params": parameters[2:]}], lr=0.0)
    other = torch.optim.SGD(parameters[:1], lr=0.0)
    monitor.before(Clock(), 1)
    one.step()
    other.step()
    found: Any = monitor.measure(outcome(0))
    assert found["norms"].tolist() == pytest.approx([10.0, 15.0, 5.0])
    assert judged(monitor) == pytest.approx({"gradient_norm/a": math.sqrt(125), "gradient_norm/b": 15.0})
    monitor.end()


def test_a_parameter_that_two_steps_give_counts_once_and_in_the_next_step_again() -> None:
    monitor, held = opened()
    sgd = torch.optim.SGD(held.values(), lr=0.0)
    for step in range(2):
        monitor.before(Clock(step=step), step + 1)
        sgd.step()
        sgd.step()
        assert judged(monitor) == pytest.approx({"gradient_norm/a": math.sqrt(125), "gradient_norm/b": 15.0})
        monitor.end()


def test_a_part_without_gradients_has_no_norm_and_none_has_no_values() -> None:
    monitor, held = opened()
    sgd = torch.optim.SGD(held.values(), lr=0.0)
    held["b.weight"].grad = None
    monitor.before(Clock(), 1)
    sgd.step()
    assert set(judged(monitor)) == {"gradient_norm/a"}
    monitor.end()
    for parameter in held.values():
        parameter.grad = None
    monitor.before(Clock(), 2)
    sgd.step()
    assert monitor.measure(outcome(1)) == {}
    monitor.end()


def test_an_optimizer_that_holds_pieces_is_refused() -> None:
    monitor, held = opened()
    sgd = torch.optim.SGD(held.values(), lr=0.0)
    monitor.before(Clock(), 1)
    sgd.holds_pieces = False  # type: ignore[attr-defined]
    sgd.step()
    sgd.holds_pieces = True  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=r"each rank holds pieces\. Leave it out .*sharding='replicated'"):
        sgd.step()
    monitor.end()


def changed() -> tuple[UpdateNorms, dict[str, nn.Parameter]]:
    run, held = run_of("a.weight", "a.bias", "b.weight")
    monitor = UpdateNorms()
    monitor.open(run)
    return monitor, held


def test_updates_are_what_changed_since_before() -> None:
    monitor, held = changed()
    monitor.before(Clock(), 2)
    with torch.no_grad():
        held["a.weight"].add_(torch.tensor([3.0, 4.0]))
        held["a.bias"].sub_(torch.tensor([0.0, 12.0]))
    found: Any = monitor.measure(outcome(0))
    assert found.keys() == {"update_norm"}
    assert found["update_norm"].tolist() == [5.0, 12.0, 0.0]
    told = {name: value.tolist() for name, value in found.items()}
    assert monitor.judge(told, outcome(0)) == {"update_norm/a": 13.0, "update_norm/b": 0.0}
    assert held["b.weight"].tolist() == [3.0, 3.0], "the model is as it was"


@pytest.mark.parametrize(("number", "takes"), [(1, True), (2, False), (10, False), (11, True), (12, False), (21, True)])
def test_weights_are_measured_the_first_time_and_every_tenth_after(number: int, takes: bool) -> None:
    monitor, held = changed()
    monitor.before(Clock(), number)
    with torch.no_grad():
        held["b.weight"].copy_(torch.tensor([6.0, 8.0]))
    found: Any = monitor.measure(outcome(0))
    assert ("weight_norm" in found) is takes
    told = monitor.judge({name: value.tolist() for name, value in found.items()}, outcome(0))
    weights = {name: value for name, value in told.items() if name.startswith("weight_norm/")}
    after = {"weight_norm/a": math.sqrt(2 * 1 + 2 * 4), "weight_norm/b": 10.0}
    assert weights == (pytest.approx(after) if takes else {})
    assert told["update_norm/b"] == pytest.approx(math.sqrt(3**2 + 5**2))


def test_copies_are_let_go_at_the_end() -> None:
    monitor, _ = changed()
    assert monitor._before == []
    monitor.before(Clock(), 1)
    assert len(monitor._before) == 3
    monitor.end()
    assert monitor._before == []
