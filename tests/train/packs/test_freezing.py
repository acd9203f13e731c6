"""Freezing in packs: by methods it multiplies with each token's route; by hand in mid-run it's refused by name."""

from __future__ import annotations

import pytest
import torch

from cosmati.core.method import Method
from cosmati.errors import PlanError
from cosmati.methods import DepthCurriculum, LayerFreezing
from cosmati.methods.functional import freeze_layers
from tests.train.packs.samples import (
    TAXONOMY,
    WEIGHTS,
    documents,
    exact,
    first_step,
    model,
    oracle,
    policy,
    region_of,
    source,
    trainer,
    values,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("frozen", ["embedding.weight", "blocks.0.", "head.weight", ""])
def test_a_parameter_frozen_in_mid_run_is_named(step: int, frozen: str) -> None:
    network = model()
    microbatches = first_step(source(documents()))
    with trainer(network, None, policy(), budget="8ba") as run:
        for _ in range(step):
            run.step_microbatches(microbatches, [None, None])
        for name, parameter in network.named_parameters():
            if name.startswith(frozen) and name != "norm.weight":
                parameter.requires_grad_(False)
        with pytest.raises(PlanError, match=rf"{frozen}.* trained, and doesn't now.* freeze with LayerFreezing"):
            run.step_microbatches(microbatches, [None, None])
        assert run.clock.step == step
        network.requires_grad_(True)
        run.step_microbatches(microbatches, [None, None])
        assert run.clock.step == step + 1


def test_the_function_that_freezes_for_good_is_refused_too() -> None:
    network = model()
    microbatches = first_step(source(documents()))
    run = trainer(network, None, policy(), budget="8ba")
    run.step_microbatches(microbatches, [None, None])
    freeze_layers(network, [one.optimizer for one in run.assembly.optimizers], 0.8)
    with pytest.raises(PlanError, match="trained, and doesn't now"):
        run.step_microbatches(microbatches, [None, None])
    assert run.clock.step == 1


@pytest.mark.parametrize(
    ("method", "shut"),
    [
        (LayerFreezing(freeze_start=0.0, freeze_level=0.5), ("embedding.",)),
        (DepthCurriculum(end=1.0), ("embedding.", "blocks.0.attention")),
        (DepthCurriculum(first="input", groups=("embedding.*", "blocks.*", "head.*"), end=1.0), ("head.",)),
    ],
)
def test_what_is_shut_learns_from_no_token_and_the_rest_as_its_route_says(
    method: Method, shut: tuple[str, ...]
) -> None:
    network = model().double()
    microbatches = first_step(source(documents()))
    # Without a source, class ids are the taxonomy's.
    with trainer(network, None, policy(), methods=[method], loss=exact, budget="4ba") as run:
        for step in range(3):
            expected = oracle(network, microbatches, lambda own, name: WEIGHTS[TAXONOMY.classes[own]][region_of(name)])
            frozen = method.frozen(list(expected), run.position())
            before = values(network)
            run.step_microbatches(microbatches, [None, None])
            for name, p in network.named_parameters():
                gradient = torch.zeros_like(p) if name in frozen else expected[name]
                torch.testing.assert_close(before[name] - p.detach(), gradient, rtol=1e-9, atol=1e-12, msg=name)
            if step == 1:
                assert any(name.startswith(shut) for name in frozen)
                assert len(frozen) < len(expected)
