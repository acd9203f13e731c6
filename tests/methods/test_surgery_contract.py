"""What every method that rebuilds models owes them: their hooks, names, places and optimizers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from cosmati import methods as m
from cosmati.core.method import Method, overrides
from tests.methods.cases import CASES, Case, digits, network_of, text

SURGERY = [case for case in CASES if overrides(case.on, "apply")]
each_case = pytest.mark.parametrize("case", SURGERY, ids=str)


def applied(method: Method, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method.apply(model, optimizers)


def example(case: Case) -> Tensor:
    return (text() if case.is_text else digits())[0][:4]


def groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return two optimizers: weights of the first half of the layers in two groups, the rest in one."""
    parameters = list(model.parameters())
    half = len(parameters) // 2
    return [
        torch.optim.SGD([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:half]}], lr=0.1, momentum=0.9),
        torch.optim.AdamW(parameters[half:], lr=0.01),
    ]


@each_case
def test_optimizers_hold_each_parameter_once_and_no_dead_ones(case: Case) -> None:
    model = network_of(case)
    optimizers = groups(model)
    options = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
    model = applied(case.on, model, optimizers)
    held = [parameter for o in optimizers for group in o.param_groups for parameter in group["params"]]
    assert len({id(p) for p in held}) == len(held)
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}
    assert [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups] == options
    output = model.train()(example(case))
    output.float().square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@each_case
def test_hooks_of_every_layer_go_on_firing_and_can_be_removed(case: Case) -> None:
    model = network_of(case)
    kept: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: kept.add(name)) for name, module in model.named_modules()
    ]
    plain = copy.deepcopy(model)
    plain.eval()(example(case))
    ran = set(kept)
    kept.clear()
    model = applied(case.on, model).eval()
    model(example(case))
    if isinstance(case.on, m.NoOpModel):
        assert kept == ran
        kept.clear()
        model(example(case))
        assert kept == {""}, "the second time only the root runs"
    assert kept <= ran
    missing = ran - kept - ({""} if isinstance(case.on, m.NoOpModel) else set())
    assert isinstance(case.on, m.NoOpModel) or missing == set()
    for handle in handles:
        handle.remove()
    kept.clear()
    model(example(case))
    assert kept == set()


@each_case
def test_twice_is_once(case: Case) -> None:
    once = applied(case.on, network_of(case))
    twice = applied(case.on, applied(case.on, network_of(case)))
    assert str(once) == str(twice)
    assert once.state_dict().keys() == twice.state_dict().keys()
    assert all(torch.equal(value, twice.state_dict()[name]) for name, value in once.state_dict().items())
    torch.manual_seed(0)
    first = once(example(case))
    torch.manual_seed(0)
    assert torch.equal(first, twice(example(case)))


@each_case
def test_copies_and_loads_what_it_saved(case: Case) -> None:
    model = applied(case.on, network_of(case)).eval()
    copied = copy.deepcopy(model)
    assert torch.equal(copied(example(case)), model(example(case)))
    other = applied(case.on, network_of(case)).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(example(case)), model(example(case)))


@each_case
def test_keeps_type_device_and_mode(case: Case) -> None:
    model = network_of(case).double().eval()
    before = {name: p.dtype for name, p in model.named_parameters()}
    changed = applied(case.on, model)
    assert {p.dtype for p in changed.parameters()} == {torch.float64}
    assert {name for name, p in changed.named_parameters() if name in before and p.dtype != before[name]} == set()
    assert not any(module.training for module in changed.modules())


@each_case
def test_frozen_parameters_stay_frozen(case: Case) -> None:
    model = network_of(case)
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    changed = applied(case.on, model)
    names = set(network_of(case).state_dict())
    assert not [name for name, p in changed.named_parameters() if p.requires_grad and name in names]


ROOTS: dict[str, tuple[nn.Module, Tensor]] = {
    "BlurPool": (nn.Conv2d(4, 4, 3, stride=2), torch.rand(2, 4, 8, 8)),
    "GhostBatchNorm": (nn.BatchNorm2d(4), torch.rand(8, 4, 8, 8)),
    "SqueezeExcite": (nn.Conv2d(4, 4, 3), torch.rand(2, 4, 8, 8)),
    "WeightStandardization": (nn.Conv2d(4, 4, 3), torch.rand(2, 4, 8, 8)),
}


@pytest.mark.parametrize("name", ROOTS)
def test_the_root_itself_may_be_changed(name: str) -> None:
    case = next(case for case in CASES if str(case) == name)
    layer, input = ROOTS[name]
    model = copy.deepcopy(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = case.on.apply(model)
    assert type(changed) is not type(layer)
    assert not torch.equal(changed(input), layer(input))
