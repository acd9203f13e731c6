"""Gradient Routing's detach against a backward pass by hand, row by row in float64, and against the paper's formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.plan import Promise
from cosmati.errors import PlanError
from cosmati.methods import SAM
from cosmati.optim import AdamW
from cosmati.routing.gradient_routing import GradientMask, GradientRouting
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.train.strategies.samples import (
    CLASSES,
    REGIONS,
    Array,
    Branch,
    Net,
    by_hand,
    gradients,
    mean_by_hand,
    microbatches,
    region_of,
    summed,
    trainer,
)

WEIGHTS = {
    "kept": {"stem": 1.0, "side": 1.0, "forget": 0.0, "head": 1.0},
    "gone": {"stem": 0.5, "side": 0.0, "forget": 1.0, "head": 0.25},
    "both": dict.fromkeys(REGIONS, 1.0),
}
ONES = dict.fromkeys(CLASSES, dict.fromkeys(REGIONS, 1.0))


def close(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-11, atol=1e-13, err_msg=name)


def test_denied_regions_cut_what_flows_through_them() -> None:
    network = Net()

    def alone(p: Any, row: Array, target: int, class_name: str) -> dict[str, Array]:
        cut = {"kept": {"extra": 0.0}, "gone": {"side": 0.0}, "both": {}}[class_name]
        return by_hand(p, row, target, **cut)

    expected = mean_by_hand(network, microbatches(), WEIGHTS, alone)
    close(gradients(network, WEIGHTS, GradientRouting()), expected)


def test_without_it_what_flows_on_stays_as_it_is() -> None:
    """The control: routes alone leave activations' gradients alone, and that isn't the same."""
    network, other = Net(), Net()
    expected = mean_by_hand(network, microbatches(), WEIGHTS, lambda p, row, target, _: by_hand(p, row, target))
    found = gradients(network, WEIGHTS)
    close(found, expected)
    assert not np.allclose(found["stem.weight"], gradients(other, WEIGHTS, GradientRouting())["stem.weight"])


def test_cuts_of_some_units() -> None:
    network = Net()
    cuts = (
        GradientMask(classes="gone", module="stem", units=(1, 4), weight=0.25),
        GradientMask(classes="kept", module="side"),
        GradientMask(classes="**", module="extra", weight=0.5),
    )

    def alone(p: Any, row: Array, target: int, class_name: str) -> dict[str, Array]:
        units = [1, 0.25, 0.25, 0.25, 1, 1] if class_name == "gone" else [1] * 6
        return by_hand(p, row, target, side=float(class_name != "kept"), extra=0.5, units=units)

    expected = mean_by_hand(network, microbatches(), WEIGHTS, alone)
    close(gradients(network, WEIGHTS, GradientRouting(cuts=cuts)), expected)


class Images(nn.Module):
    """Channels are dimension 1; the paper's formula is written into the forward pass where a mask is given."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(1, 4, 2), nn.Linear(16, 3)
        self.mask = mask
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        found = self.conv((rows[:, :3, None] * rows[:, None, 2:])[:, None])
        if self.mask is not None:
            found = self.mask * found + (1 - self.mask) * found.detach()
        return self.head(found.flatten(1))


def test_channels_by_the_papers_formula() -> None:
    regions = {"low": "conv.*", "top": "head.*"}
    weights = dict.fromkeys(CLASSES, dict.fromkeys(regions, 1.0))
    cut = GradientMask(classes="**", module="conv", units=(1, 3), dim=1, weight=0.3)
    found, expected = Images(), Images(torch.tensor([1, 0.3, 0.3, 1], dtype=torch.float64)[:, None, None])
    first = gradients(found, weights, GradientRouting(cuts=(cut,)), regions=regions)
    close(first, gradients(expected, weights, regions=regions))


def test_a_policy_that_denies_nothing_gives_the_same_bits() -> None:
    found, plain = (gradients(Net(), ONES, *methods) for methods in ((GradientRouting(),), ()))
    assert all(np.array_equal(found[name], plain[name]) for name in found)


def trained(*methods: Any, swapped: str = "", steps: int = 3) -> dict[str, Tensor]:
    network = Net()
    run = trainer(network, WEIGHTS, *methods, optimizers=[AdamW(lr=0.01, weight_decay=0.1)])
    with run:
        for step in range(steps):
            batches = microbatches(seed=step, swapped=swapped if step == steps - 1 else "")
            run.step_microbatches(batches, [batch.class_id for batch in batches])
    assert not any(module._forward_hooks for module in network.modules())
    return {name: p.detach().clone() for name, p in network.named_parameters()}


def test_the_promise_holds_and_the_plan_says_what_differs() -> None:
    run = trainer(Net(), WEIGHTS, GradientRouting())
    assert run.plan.holds(Promise.NO_DIRECT_WRITE, ("gone", "side"))
    assert "GradientRouting(): activation gradients are cut at denied regions' outputs" in str(run.plan)
    one, other = trained(GradientRouting()), trained(GradientRouting(), swapped="gone")
    moved = {region_of(name) for name in one if not torch.equal(one[name], other[name])}
    assert moved == {"stem", "forget", "head"}


def test_a_second_pass_is_cut_too() -> None:
    both = trained(GradientRouting(), SAM(rho=0.05))
    assert not torch.equal(both["stem.weight"], trained(SAM(rho=0.05))["stem.weight"])
    assert not torch.equal(both["stem.weight"], trained(GradientRouting())["stem.weight"])


def test_denied_rows_without_a_finite_gradient_reach_nothing() -> None:
    """0 x inf would be NaN."""

    class Steep(Net):
        def forward(self, rows: Tensor) -> Tensor:
            hidden = torch.tanh(self.stem(rows))
            return self.head(hidden) + self.extra(torch.sqrt(hidden.abs() * 0) + hidden.detach())

    weights = {**WEIGHTS, "both": WEIGHTS["kept"], "gone": {**WEIGHTS["kept"], "head": 0.5}}
    regions = {"stem": "stem.*", "rest": "side.*", "forget": "extra.*", "head": "head.*"}
    weights = {c: {r: row.get(r, 1.0) for r in regions} for c, row in weights.items()}
    found = gradients(Steep(), weights, GradientRouting(), regions=regions)
    assert all(np.isfinite(value).all() for value in found.values())
    assert np.abs(found["stem.weight"]).max() > 0


def test_masked_units_without_a_finite_gradient_are_zero() -> None:
    class Steep(Net):
        def forward(self, rows: Tensor) -> Tensor:
            hidden = self.stem(rows)
            return self.head(hidden) + self.extra(self.side(hidden)) + torch.sqrt(hidden[:, :3] * 0)

    mask = GradientMask(classes="**", module="stem", units=(0, 3))
    found = gradients(Steep(), ONES, GradientRouting(cuts=(mask,)))
    assert not found["stem.bias"][:3].any()
    assert np.isfinite(found["stem.weight"]).all()
    assert found["stem.bias"][3:].all()


class Loose(Net):
    """Reads a branch's weight by itself."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + self.side.up.weight.sum()


class Uncalled(Net):
    """Runs a branch's layers, and not the branch."""

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(rows))
        hidden = hidden + self.side.down(torch.tanh(self.side.up(hidden)))
        return self.head(hidden) + self.extra(hidden)


class Bare(Net):
    """Holds a parameter of a branch beside the others."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * self.gain


@pytest.mark.parametrize("kind", [Loose, Uncalled])
def test_a_way_past_the_output_is_refused(kind: type[Net]) -> None:
    with pytest.raises(PlanError, match=r"can't cut side: .* leave GradientRouting out"):
        gradients(kind(), WEIGHTS, GradientRouting())


class Idle(Net):
    """Has a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Identity()


@pytest.mark.parametrize(("kind", "module"), [(Uncalled, "side"), (Idle, "idle")])
def test_a_mask_on_what_is_not_called_is_refused(kind: type[Net], module: str) -> None:
    cuts = (GradientMask(classes="gone", module=module, units=(0, 2)),)
    with pytest.raises(PlanError, match=f"can't cut {module}"):
        gradients(kind(), ONES, GradientRouting(cuts=cuts))


def test_what_has_no_output_of_its_own_is_refused() -> None:
    regions = {**REGIONS, "side": "[sg][ia]*"}
    with pytest.raises(PlanError, match=r"no output to cut for gain: the model \(Bare\)"):
        gradients(Bare(), WEIGHTS, GradientRouting(), regions=regions)


def test_a_class_that_is_left_nothing_to_teach_is_refused() -> None:
    weights = {**WEIGHTS, "gone": {"stem": 1.0, "side": 1.0, "forget": 0.0, "head": 0.0}}
    with pytest.raises(PlanError, match=r"gone can teach nothing at all"):
        gradients(Net(), weights, GradientRouting())
    cuts = (GradientMask(classes="gone", module="stem"), GradientMask(classes="gone", module="side"))
    with pytest.raises(PlanError, match=r"gone can teach nothing at all"):
        gradients(Net(), weights, GradientRouting(cuts=cuts))


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        ({"classes": "none", "module": "stem"}, "no class 'none'"),
        ({"classes": "gone", "module": "stam"}, "no module 'stam'"),
        ({"classes": "gone", "module": "stem", "units": (3, 9)}, "no such units"),
        ({"classes": "gone", "module": "stem", "units": (0, 2), "dim": 0}, "no such units"),
    ],
)
def test_cuts_that_mask_nothing_are_refused(cut: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        gradients(Net(), ONES, GradientRouting(cuts=(GradientMask(**cut),)))


@pytest.mark.parametrize("options", [{"weight": 1.5}, {"weight": -0.75}, {"units": (2, 2)}, {"units": (-1, 2)}])
def test_masks_that_lift_or_are_empty_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"Give a weight from 0 to 1|0 <= first < last"):
        GradientMask(classes="gone", module="stem", **options)


def test_one_mask_that_is_no_tuple_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Give a tuple: cuts="):
        GradientRouting(cuts=GradientMask(classes="gone", module="stem"))  # type: ignore[arg-type]


def test_a_run_without_a_policy_and_compiled_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"GradientRouting\(\) goes by what a policy denies"):
        Trainer(Net(), summed, optimizers=[AdamW(lr=0.1)], methods=[GradientRouting()], config=RunConfig(budget="1ba"))
    config = RunConfig(budget="8ba", num_microbatches=8, num_threads=1, compile_blocks=True)
    with pytest.raises(PlanError, match=r"Use compile_blocks=False"):
        gradients(Net(), WEIGHTS, GradientRouting(), config=config)


def test_one_branch_is_cut_in_any_container() -> None:
    """A module may give a tuple or a mapping, and be called twice."""

    class Told(Branch):
        def forward(self, hidden: Tensor) -> Any:
            return {"out": (super().forward(hidden), torch.arange(3))}

    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            state = self.side.state_dict()
            self.side = Told(6, 7, 6).double()
            self.side.load_state_dict(state)

        def forward(self, rows: Tensor) -> Tensor:
            hidden = torch.tanh(self.stem(rows))
            hidden = hidden + self.side(hidden)["out"][0] + 0 * self.side(hidden)["out"][0]
            return self.head(hidden) + self.extra(hidden)

    close(gradients(Twice(), WEIGHTS, GradientRouting()), gradients(Net(), WEIGHTS, GradientRouting()))


def test_a_mask_is_for_rows_of_several_classes_too() -> None:
    below, one = GradientMask(classes="mail/**", module="stem"), GradientMask(classes="mail/in", module="stem")
    for name in ("mail/in", "mail/in&open", "another&mail/in"):
        assert (below.covers(name), one.covers(name)) == (True, True)
    for name in ("open", "email/in&open", "mailbox&open"):
        assert (below.covers(name), one.covers(name)) == (False, False)
