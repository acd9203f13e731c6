"""A masked activation keeps its bits, hands on its gradient times the mask, and lets no other way past it."""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.passing import Passing
from cosmati.errors import BatchError, PlanError
from cosmati.routing.gradient_routing import GradientMask, GradientRouting, _broadcast, _Mask, _masking, outermost

CLASSES = ("a", "b", "a&b")
FLOAT64 = torch.float64
ADMITTED = {"low": 1.0, "rest": 1.0}


class Several(NamedTuple):
    """What a module gives, in a nest of its own."""

    numbers: Tensor
    counts: Tensor
    more: dict[str, Any]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(low=nn.Linear(2, 3), rest=nn.Linear(3, 2))).double()


def passing_of(
    class_ids: object, weights: dict[str, Any], network: nn.Module | None = None, *, is_compiled: bool = False
) -> Passing:
    network = model() if network is None else network
    regions = {
        region: {name: p for name, p in network.named_parameters() if name.startswith(region)} for region in weights
    }
    tables = {region: torch.tensor(given, dtype=FLOAT64) for region, given in weights.items()}
    ids = torch.tensor(class_ids)
    return Passing(network, CLASSES, ids, tables, regions, is_compiled, lambda _: nullcontext())


def mask_of(factor: object, **options: Any) -> _Mask:
    cut = GradientMask(classes="**", module="low", **options) if options else None
    return _Mask("low", nn.Identity(), torch.tensor(factor, dtype=FLOAT64), cut)


def masked(mask: _Mask, output: Any) -> Any:
    return _masking(mask, set())(nn.Identity(), None, output)


# ------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("weight", [-0.01, 1.01, float("nan"), float("inf")])
def test_a_mask_lifts_nothing(weight: float) -> None:
    with pytest.raises(PlanError, match=r"never lift it\. Give a weight from 0 to 1"):
        GradientMask(classes="a", module="low", weight=weight)


@pytest.mark.parametrize("units", [(1, 1), (2, 1), (-1, 1), (0, 0)])
def test_units_are_a_range_with_something_in_it(units: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match=re.escape("0 <= first < last")):
        GradientMask(classes="a", module="low", units=units)
    assert GradientMask(classes="a", module="low", units=(0, 1)).units == (0, 1)


def test_a_mask_is_of_the_last_dimension_and_of_all_units_unless_it_says_so() -> None:
    mask = GradientMask(classes="a", module="low")
    assert (mask.dim, mask.units) == (-1, None)
    with pytest.raises(TypeError):
        GradientMask("a", "low")  # type: ignore[misc]


@pytest.mark.parametrize("cuts", [GradientMask(classes="a", module="low"), ("low",), None, "low"])
def test_cuts_are_several_masks(cuts: Any) -> None:
    with pytest.raises(PlanError, match=r"^cuts=.* aren't masks\. Give a tuple"):
        GradientRouting(cuts=cuts)


def test_a_list_of_masks_is_as_good_and_what_is_cut_is_told() -> None:
    cuts: Any = [GradientMask(classes="a", module="low")]
    assert "cut at the masked units, so" in GradientRouting(cuts=cuts).contract
    assert "cut at denied regions' outputs, so" in GradientRouting().contract


# ------------------------------------------------------------------------------------------------------- activations


def test_a_gradient_is_multiplied_row_by_row_and_token_by_token() -> None:
    factor = [[1.0, 0.0, 0.5], [0.25, 1.0, 0.0]]
    given = torch.randn(2, 3, 4, dtype=FLOAT64, requires_grad=True)
    found = masked(mask_of(factor), given)
    assert torch.equal(found, given)
    weights = torch.randn(2, 3, 4, dtype=FLOAT64)
    (gradient,) = torch.autograd.grad((found * weights).sum(), given)
    assert torch.equal(gradient, weights * torch.tensor(factor, dtype=FLOAT64)[..., None])


def test_a_gradient_that_is_not_finite_is_nothing_behind_a_mask_of_0() -> None:
    given = torch.ones(1, 2, 1, dtype=FLOAT64, requires_grad=True)
    scale = torch.tensor([[[torch.inf], [2.0]]], dtype=FLOAT64)
    (gradient,) = torch.autograd.grad((masked(mask_of([[0.0, 0.5]]), given) * scale).sum(), given)
    assert gradient.tolist() == [[[0.0], [1.0]]]


def test_what_comes_behind_a_mask_works_in_place_and_leaves_the_activation() -> None:
    given = torch.tensor([-1.0, 2.0], dtype=FLOAT64, requires_grad=True)
    found = masked(mask_of(0.5), given * 1.0)
    assert found.relu_().tolist() == [0.0, 2.0]
    (gradient,) = torch.autograd.grad(found.sum(), given)
    assert gradient.tolist() == [0.0, 0.5]


@pytest.mark.parametrize(("factor", "is_cut"), [(0.0, True), (0.5, False), ([[0.0]], True), ([[0.1]], False)])
def test_a_mask_that_is_shut_cuts_the_graph_and_another_does_not(factor: object, *, is_cut: bool) -> None:
    found = masked(mask_of(factor), torch.ones(1, 1, 2, requires_grad=True))
    assert found.requires_grad is not is_cut


def test_what_has_no_graph_is_left_as_it_is_and_seen_all_the_same() -> None:
    for factor in (0.0, 0.5):
        seen: set[str] = set()
        given = torch.ones(2)
        assert _masking(mask_of(factor), seen)(nn.Identity(), None, given) is given
        assert seen == {"low"}


def test_integers_alone_are_nothing_that_a_mask_has_seen() -> None:
    seen: set[str] = set()
    given = [torch.arange(3), None, "text"]
    assert _masking(mask_of(0.0), seen)(nn.Identity(), None, given) == given
    assert seen == set()


def several() -> Several:
    numbers, more = (torch.ones(2, 2, dtype=FLOAT64, requires_grad=True) for _ in range(2))
    return Several(numbers, torch.arange(3), {"more": more, "none": None})


def test_all_that_a_module_gives_is_masked_in_the_nest_that_it_gives() -> None:
    given = several()
    found = masked(mask_of(0.5), given)
    assert type(found) is Several
    assert found.counts is given.counts
    assert found.more["none"] is None
    gradients = torch.autograd.grad(found.numbers.sum() + found.more["more"].sum(), [given.numbers, given.more["more"]])
    assert [gradient.tolist() for gradient in gradients] == [[[0.5] * 2] * 2] * 2


def test_units_are_those_of_the_first_numbers_that_a_module_gives_at_each_call() -> None:
    hook = _masking(mask_of(0.0, units=(1, 2)), set())
    for _ in range(2):
        given = several()
        found = hook(nn.Identity(), None, [given.counts, given.numbers, given.more])
        assert found[2]["more"] is given.more["more"]
        (gradient,) = torch.autograd.grad(found[1].sum(), given.numbers)
        assert gradient.tolist() == [[1.0, 0.0]] * 2


# ------------------------------------------------------------------------------------------------- shapes and units


def test_a_mask_of_rows_fits_what_has_any_shape() -> None:
    for shape in ((3,), (2, 3, 4)):
        found = _broadcast(mask_of(0.5), torch.ones(shape, dtype=torch.float32))
        assert (found.dtype, found.shape) == (torch.float32, (1,) * len(shape))
        assert found.item() == 0.5


@pytest.mark.parametrize("shape", [(2, 3), (6, 4), (3, 2, 4), (2, 4, 3), (2, 2, 3, 4)])
def test_a_mask_of_tokens_needs_rows_and_tokens_and_something_behind_them(shape: tuple[int, ...]) -> None:
    said = rf"low gives {re.escape(str(list(shape)))} for packs \[2, 3\]\. Let it give \[rows, tokens, \.\.\.\]"
    with pytest.raises(PlanError, match=said):
        _broadcast(mask_of([[1.0, 0.0, 0.5]] * 2), torch.ones(shape))
    assert _broadcast(mask_of([[1.0, 0.0, 0.5]] * 2), torch.ones(2, 3, 1)).shape == (2, 3, 1)
    assert _broadcast(mask_of([[1.0, 0.0, 0.5]] * 2), torch.ones(2, 3, 4, 5)).shape == (2, 3, 1, 1)
    with pytest.raises(PlanError, match=r"no other dimension \(heads\)"):
        _broadcast(mask_of([[1.0, 0.0, 0.5]] * 2), torch.ones(2, 3, 3, 5))


@pytest.mark.parametrize(
    ("dim", "units", "expected"),
    [
        (-1, (1, 3), [[[1.0, 0.5, 0.5, 1.0]]]),
        (2, (0, 4), [[[0.5] * 4]]),
        (1, (2, 3), [[[1.0], [1.0], [0.5]]]),
        (-2, (0, 1), [[[0.5], [1.0], [1.0]]]),
    ],
)
def test_units_lie_in_the_dimension_that_is_named(dim: int, units: tuple[int, int], expected: Any) -> None:
    found = _broadcast(mask_of(0.5, dim=dim, units=units), torch.ones(2, 3, 4, dtype=FLOAT64))
    assert found.tolist() == expected


def test_units_of_tokens_are_masked_where_both_are() -> None:
    found = _broadcast(mask_of([[1.0, 0.25]], units=(1, 2)), torch.ones(1, 2, 2, dtype=FLOAT64))
    assert found.tolist() == [[[1.0, 1.0], [1.0, 0.25]]]


@pytest.mark.parametrize(
    ("factor", "dim", "units"),
    [
        (0.5, -1, (0, 5)),
        (0.5, 0, (0, 1)),
        (0.5, -3, (0, 1)),
        (0.5, 3, (0, 1)),
        (0.5, -4, (0, 1)),
        ([[0.5] * 3] * 2, 1, (0, 1)),
        ([[0.5] * 3] * 2, -2, (0, 1)),
    ],
)
def test_units_that_are_not_there_or_are_rows_or_tokens_are_refused(
    factor: object, dim: int, units: tuple[int, int]
) -> None:
    with pytest.raises(PlanError, match=r"low gives \[2, 3, 4\], which has no such units\. Mend units or dim\."):
        _broadcast(mask_of(factor, dim=dim, units=units), torch.ones(2, 3, 4))


# ------------------------------------------------------------------------------------------------- a whole microbatch


def run(routing: GradientRouting, passing: Passing, given: Tensor | None = None) -> list[Tensor]:
    """Run a microbatch as the trainer does, and return what it gives and the gradients of its parameters."""
    given = torch.ones(1, 2, dtype=FLOAT64) if given is None else given
    with routing.passing(passing, None):  # type: ignore[arg-type]
        output = passing.model(given)
        objective = output.sin().sum()
        for look in passing.looks:
            look(objective)
        objective.backward()
    gradients = [p.grad for p in passing.model.parameters()]
    return [output.detach(), *(torch.zeros(()) if one is None else one for one in gradients)]


def test_masks_of_ones_own_scale_what_lies_nearer_the_input_and_are_taken_off() -> None:
    routing = GradientRouting(cuts=(GradientMask(classes="a", module="low", weight=0.25),))
    plain, found = run(GradientRouting(), passing_of(0, ADMITTED)), run(routing, cut := passing_of(0, ADMITTED))
    assert torch.equal(plain[0], found[0])
    assert all(torch.equal(0.25 * one, other) for one, other in zip(plain[1:3], found[1:3], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(plain[3:], found[3:], strict=True))
    assert len(cut.looks) == 1
    assert not cut.model.get_submodule("low")._forward_hooks


def test_without_denials_nothing_is_looked_at_even_where_blocks_are_compiled() -> None:
    passing = passing_of(0, ADMITTED, is_compiled=True)
    with GradientRouting().passing(passing, None):  # type: ignore[arg-type]
        assert not any(module._forward_hooks for module in passing.model.modules())
    assert passing.looks == []
    one = GradientRouting(cuts=(GradientMask(classes="b", module="low"),))
    with one.passing(passing, None):  # type: ignore[arg-type]
        assert passing.looks == []


def test_compiled_blocks_are_refused_where_something_is_cut() -> None:
    routing = GradientRouting(cuts=(GradientMask(classes="a", module="low"),))
    with (
        pytest.raises(PlanError, match=r"compiled blocks may not let it\. Use compile_blocks=False"),
        routing.passing(passing_of(0, ADMITTED, is_compiled=True), None),  # type: ignore[arg-type]
    ):
        pass


def test_a_policys_denial_cuts_a_region_and_what_lies_nearer_the_input() -> None:
    network = nn.Sequential(OrderedDict(low=nn.Linear(2, 2), mid=nn.Linear(2, 2), rest=nn.Linear(2, 2))).double()
    _, *gradients = run(GradientRouting(), passing_of(0, {"low": 1.0, "mid": 0.0, "rest": 1.0}, network))
    assert [bool(one.any()) for one in gradients] == [False] * 4 + [True] * 2


class Past(nn.Module):
    """Gets past what `low` gives in some way."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.low, self.rest, self.plain = nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()
        self.way = way

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.way(self, given)
        return found


WAYS = {
    "it isn't called": lambda own, given: own.rest(given @ own.low.weight),
    "its weight is read beside it": lambda own, given: own.rest(own.low(given) + own.low.bias),
    "both": lambda own, given: own.rest(given @ own.low.weight + own.low.bias),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_way_past_a_denied_region_is_refused_by_its_name_told_once(way: Any) -> None:
    passing = passing_of(0, {"low": 0.0, "rest": 1.0}, Past(way).double())
    with pytest.raises(PlanError, match=r"^GradientRouting can't cut low: the loss gets past"):
        run(GradientRouting(), passing)


def test_a_weight_beside_a_mask_of_ones_own_may_be_read_and_one_of_a_module_that_is_not_called_may_not() -> None:
    """Such a mask is of what the module gives, and not of its weights."""
    routing = GradientRouting(cuts=(GradientMask(classes="**", module="low"),))
    passing = passing_of(0, ADMITTED, Past(WAYS["its weight is read beside it"]).double())
    _, weight, bias, *_ = run(routing, passing)
    assert (bool(weight.any()), bool(bias.any())) == (False, True)
    with pytest.raises(PlanError, match="can't cut low:"):
        run(routing, passing_of(0, ADMITTED, Past(WAYS["it isn't called"]).double()))


def test_a_module_that_is_left_out_needs_no_mask_unless_nobody_could_tell() -> None:
    def leave_out(own: Any, given: Tensor) -> Tensor:
        found: Tensor = own.rest(given)
        return found

    cuts = tuple(GradientMask(classes="**", module=name) for name in ("low", "plain"))
    network = Past(leave_out).double()
    assert run(GradientRouting(cuts=cuts[:1]), passing_of(0, ADMITTED, network))[3].any()
    with pytest.raises(PlanError, match=r"can't cut plain: the loss gets past"):
        run(GradientRouting(cuts=cuts), passing_of(0, ADMITTED, network))


def test_a_class_that_can_teach_nothing_behind_a_cut_is_refused_by_name() -> None:
    weights = {"low": 1.0, "rest": 0.0}
    for ids, said in ((1, "b can"), (2, "a&b can")):
        network = model()
        passing = passing_of(ids, weights, network)
        with (
            pytest.raises(PlanError, match=rf"^With GradientRouting, {said} teach nothing at all"),
            GradientRouting().passing(passing, None),  # type: ignore[arg-type]
        ):
            passing.looks[0](network(torch.ones(1, 2, dtype=FLOAT64)).sum() + torch.ones((), requires_grad=True))
    tokens = passing_of([[1, 0, -1, 1]], {"low": [[1.0, 1.0, 0.0, 1.0]], "rest": [[0.0, 0.0, 0.0, 0.0]]})
    with (
        pytest.raises(PlanError, match=r"^With GradientRouting, a, b can teach"),
        GradientRouting().passing(tokens, None),  # type: ignore[arg-type]
    ):
        raise BatchError("The loss has no graph.")


def test_another_complaint_about_a_batch_stays_what_it_is() -> None:
    complaint = BatchError("The rows are too few.")
    with (
        pytest.raises(BatchError) as found,
        GradientRouting().passing(passing_of(0, {"low": 0.0, "rest": 1.0}), None),  # type: ignore[arg-type]
    ):
        raise complaint
    assert found.value is complaint


def test_regions_that_may_teach_and_hold_nothing_are_not_missed() -> None:
    passing = passing_of(0, {"low": 0.0, "none": 1.0}, nn.Sequential(OrderedDict(low=nn.Linear(2, 2))).double())
    with GradientRouting().passing(passing, None):  # type: ignore[arg-type]
        passing.looks[0](torch.ones((), requires_grad=True) * 1.0)
    assert len(passing.looks) == 1


def test_a_module_without_a_forward_pass_of_its_own_is_looked_into() -> None:
    network = nn.ModuleDict({"one": nn.ModuleList([nn.Linear(1, 1)]), "other": nn.Linear(1, 1)})
    found = [path for path, _ in outermost(network, dict(network.named_parameters()))]
    assert found == ["one.0", "other"]


def test_a_number_is_masked_whole() -> None:
    given = torch.ones((), requires_grad=True)
    (found,) = torch.autograd.grad(masked(mask_of(0.5), given), given)
    assert float(found) == 0.5
