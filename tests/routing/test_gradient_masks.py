"""Which activations Gradient Routing masks, and by how much: by a policy's denials, or by masks of the user's own."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.passing import Passing
from cosmati.errors import PlanError
from cosmati.routing.gradient_routing import GradientMask, _Mask, _of_cuts, _of_policy, outermost

CLASSES = ("a", "b", "branch/c", "a&branch/c")
REGIONS = ("low", "high", "rest")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(given))
        return found


def model() -> nn.Sequential:
    return nn.Sequential(OrderedDict(low=Inner(), high=nn.ModuleList([Inner(), Inner()]), rest=nn.Linear(2, 1)))


def passing_of(class_ids: object, weights: dict[str, object], network: nn.Module | None = None) -> Passing:
    """Return a microbatch's, with a region for each of the model's parts."""
    network = model() if network is None else network
    parameters = {
        region: {name: p for name, p in network.named_parameters() if name.startswith(f"{region}.")}
        for region in REGIONS
    }
    tables = {region: torch.tensor(given, dtype=torch.float64) for region, given in weights.items()}
    return Passing(network, CLASSES, torch.tensor(class_ids), tables, parameters, False, lambda _: nullcontext())


def factors(passing: Passing) -> dict[str, Any]:
    return {mask.path: mask.factor.tolist() for mask in _of_policy(passing)}


def test_rows_of_a_class_mask_what_it_is_denied() -> None:
    assert factors(passing_of(1, {"low": 0.0, "high": 0.5, "rest": 1.0})) == {"low": 0.0}
    assert factors(passing_of(1, {"low": 1.0, "high": 0.0, "rest": 1.0})) == {"high.0": 0.0, "high.1": 0.0}
    assert factors(passing_of(1, {"low": 1.0, "high": 0.5, "rest": 0.25})) == {}
    assert factors(passing_of(1, dict.fromkeys(REGIONS, 0.0))) == {}, "what teaches nothing isn't run"


def test_tokens_of_a_class_are_masked_where_their_own_class_is_denied() -> None:
    ids = [[0, 0, 1, 2], [1, 2, 2, -1]]
    allowed = {"low": {0, 2}, "high": {1}, "rest": {0, 1}}
    weights = {region: [[0.5 * (one in own) for one in row] for row in ids] for region, own in allowed.items()}
    expected = {
        path: [[float(one in own or one == -1) for one in row] for row in ids]
        for path, own in {"low": {0, 2}, "high.0": {1}, "high.1": {1}, "rest": {0, 1}}.items()
    }
    assert factors(passing_of(ids, weights)) == expected


def test_tokens_that_teach_nothing_and_padding_ask_for_no_mask() -> None:
    ids = [[0, 1, -1]]
    weights: dict[str, object] = {"low": [[1.0, 0.0, 0.0]], "high": [[1.0, 0.0, 0.0]], "rest": [[1.0, 0.0, 0.0]]}
    assert factors(passing_of(ids, weights)) == {}
    assert factors(passing_of([[-1, -1]], {"low": [[0.0, 0.0]], "high": [[1.0, 1.0]], "rest": [[1.0, 1.0]]})) == {}


def test_a_token_that_may_teach_is_not_cut_since_another_of_its_class_may_not() -> None:
    """A class's tokens may be of several grades, and those that are rejected teach nothing at all."""
    by_grade: dict[str, object] = {"low": [[0.0, 1.0]], "high": [[1.0, 1.0]], "rest": [[1.0, 1.0]]}
    rejected: dict[str, object] = {"low": [[0.0, 1.0]], "high": [[0.0, 0.5]], "rest": [[0.0, 1.0]]}
    for weights in (by_grade, rejected):
        for last in (0, 3):
            found = [mask.factor[0, 1].item() for mask in _of_policy(passing_of([[last, last]], weights))]
            assert found == [1.0] * len(found)


def test_modules_are_looked_for_once_a_run_by_what_is_denied() -> None:
    weights: dict[str, object] = {"low": 0.0, "high": 0.5, "rest": 1.0}
    passing = passing_of(1, weights)
    list(_of_policy(passing))
    assert list(passing.memory) == [("outermost", frozenset({"low"}))]
    passing.memory["outermost", frozenset({"low"})] = [("kept", passing.model)]
    (mask,) = _of_policy(passing)
    assert (mask.path, mask.module, mask.cut) == ("kept", passing.model, None)


# ---------------------------------------------------------------------------------------------------- outermost modules


def paths(network: nn.Module, *prefixes: str) -> list[str]:
    own = {name: p for name, p in network.named_parameters() if name.startswith(prefixes)}
    found = list(outermost(network, own))
    assert all(network.get_submodule(path) is module for path, module in found)
    return [path for path, _ in found]


def test_the_outermost_module_that_holds_nothing_else_is_found() -> None:
    network = model()
    assert paths(network, "low.") == ["low"]
    assert paths(network, "low.up.") == ["low.up"]
    assert paths(network, "low.up.", "rest.") == ["low.up", "rest"]
    assert paths(network, "high.") == ["high.0", "high.1"], "a list isn't called"
    assert paths(network, "low.", "high.", "rest.") == [""]
    assert list(outermost(network, {})) == []


def test_what_does_not_train_is_nobodys() -> None:
    network = model()
    network.get_submodule("low.down").requires_grad_(False)
    assert paths(network, "low.up.") == ["low"]


def test_a_parameter_beside_others_has_no_output_of_its_own() -> None:
    network = model()
    with pytest.raises(PlanError, match=r"no output to cut for rest\.bias: rest \(Linear\) holds it beside"):
        paths(network, "rest.bias")
    with pytest.raises(PlanError, match=r"cut for weight: the model \(Linear\) holds it beside"):
        list(outermost(line := nn.Linear(1, 1), {"weight": line.weight}))


# ------------------------------------------------------------------------------------------------------ masks as given


@pytest.mark.parametrize(
    ("classes", "covered"),
    [
        ("a", {"a", "a&branch/c"}),
        ("branch/c", {"branch/c", "a&branch/c"}),
        ("branch/**", {"branch/c", "a&branch/c"}),
        ("a/**", set()),
        ("branch", set()),
        ("a&branch/c", {"a&branch/c"}),
        ("**", set(CLASSES)),
        ("bran/**", set()),
    ],
)
def test_a_mask_is_meant_for_classes_by_name(classes: str, covered: set[str]) -> None:
    mask = GradientMask(classes=classes, module="low")
    assert {name for name in CLASSES if mask.covers(name)} == covered


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_masks_weigh_the_rows_and_tokens_that_they_cover(weight: float) -> None:
    cut = GradientMask(classes="a", module="high.1", weight=weight)
    ids = [[0, 1, 2], [3, -1, 0]]
    passing = passing_of(ids, {region: [[1.0] * 3] * 2 for region in REGIONS})
    (mask,) = _of_cuts((cut,), passing)
    assert mask.factor.tolist() == [[weight, 1.0, 1.0], [weight, 1.0, weight]]
    assert (mask.path, mask.module, mask.cut) == ("high.1", passing.model.get_submodule("high.1"), cut)
    for class_id, expected in ((0, weight), (1, 1.0)):
        (mask,) = _of_cuts((cut,), passing_of(class_id, dict.fromkeys(REGIONS, 1.0)))
        assert mask.factor.tolist() == expected
    assert GradientMask(classes="a", module="low").weight == 0.0


def test_masks_are_put_on_in_their_order_and_by_any_name_of_a_module() -> None:
    network = model()
    network.add_module("again", network.get_submodule("low"))
    cuts = tuple(GradientMask(classes="**", module=name) for name in ("again", "low", ""))
    found = list(_of_cuts(cuts, passing_of(0, dict.fromkeys(REGIONS, 1.0), network)))
    assert [mask.path for mask in found] == ["again", "low", ""]
    assert found[0].module is found[1].module
    assert found[2].module is network


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"classes": "z", "module": "low"}, "there is no class 'z'"),
        ({"classes": "a", "module": "lower"}, "there is no module 'lower'"),
        ({"classes": "z", "module": "lower"}, "there is no module 'lower'"),
    ],
)
def test_a_mask_with_nothing_to_mask_is_refused(given: dict[str, str], said: str) -> None:
    passing = passing_of(1, dict.fromkeys(REGIONS, 1.0))
    with pytest.raises(PlanError, match=rf"{said}\. Mend it; classes are a, b, branch/c, a&branch/c\."):
        list(_of_cuts((GradientMask(**given),), passing))


@pytest.mark.parametrize(
    ("factor", "units", "is_open", "is_shut"),
    [
        (1.0, None, True, False),
        (0.0, None, False, True),
        (0.5, None, False, False),
        ([[1.0, 1.0]], None, True, False),
        ([[0.0, 1.0]], None, False, False),
        ([[0.0, 0.0]], None, False, True),
        (0.0, (0, 1), False, False),
        (1.0, (0, 1), True, False),
    ],
)
def test_a_mask_is_open_where_all_passes_and_shut_where_nothing_does(
    factor: object, units: tuple[int, int] | None, *, is_open: bool, is_shut: bool
) -> None:
    cut = GradientMask(classes="**", module="low", units=units)
    mask = _Mask("low", nn.Identity(), torch.tensor(factor), cut)
    assert (mask.is_open, mask.is_shut, mask.has_units) == (is_open, is_shut, units is not None)
    if units is None:
        plain = _Mask("low", nn.Identity(), torch.tensor(factor))
        assert (plain.is_open, plain.is_shut, plain.has_units) == (is_open, is_shut, False)
