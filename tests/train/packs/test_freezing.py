"""Parameters that somebody freezes in mid-run, past the plan: refused by name in that step, in any step."""

from __future__ import annotations

import pytest

from cosmati.errors import PlanError
from cosmati.methods.functional import freeze_layers
from tests.train.packs.samples import documents, first_step, model, policy, source, trainer


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
