"""Statistics for averaged weights come from the rows that may teach their layer, and from no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosmati.methods import EMA
from cosmati.optim import SGD, Optimizer, ScheduleFreeAdamW
from tests.train.promises.swapped import Case, Positions, trained


class Watched(nn.Sequential):
    """Two layers with BatchNorm each, which remembers what it was given."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        )
        self.forwarded: list[Tensor] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.forwarded.append(rows.clone())
        output: Tensor = super().forward(rows)
        return output


@pytest.mark.parametrize(
    ("optimizer", "methods"),
    [(SGD(lr=0.1), [EMA(half_life="2ba", update_interval="1ba")]), (ScheduleFreeAdamW(lr=0.01), [])],
)
def test_statistics_of_averages_follow_the_routes_of_their_steps(optimizer: Optimizer, methods: list[EMA]) -> None:
    case = Case(Watched, ("0.*", "1.*"), ("3.*", "4.*", "5.*"))
    rules = (
        "[{class: open, weight: 1}, {class: doubtful, phase: first, decision: reject},"
        " {class: doubtful, phase: second, region: near_input, weight: 0},"
        " {class: doubtful, phase: second, region: near_output, weight: 1}]\n"
        "phases: [{name: first, until: 2ba}, {name: second}]"
    )
    trainer = trained(case, [optimizer], methods, rules=rules)
    model = trainer.model
    assert isinstance(model, Watched)
    source = Positions(case.make, case.swap, None)
    model.forwarded.clear()
    with trainer.averaged():
        found = {name: value.clone() for name, value in model.named_buffers()}
        forwarded = list(model.forwarded)
        offered = [(s, m) for s in range(4) for m in range(4) if source.class_id(s, m) == 0 or s >= 2]
        assert len(forwarded) == len(offered) == 12
        inputs = [source.microbatch(*position).data[0] for position in offered]
        assert all(torch.equal(a, b) for a, b in zip(forwarded, inputs, strict=True))
        # By hand: layer 1 averages the open class's microbatches, layer 4 all that were offered.
        at_first = [model[0](rows) for rows in inputs]
        normalised = [nn.functional.batch_norm(h, None, None, model[1].weight, model[1].bias, True) for h in at_first]
        at_second = [model[3](h.relu()) for h in normalised]
        free = [i for i, position in enumerate(offered) if source.class_id(*position) == 0]
        for layer, seen in ((1, [at_first[i] for i in free]), (4, at_second)):
            mean = torch.stack([h.mean(0) for h in seen]).mean(0)
            variance = torch.stack([h.var(0) for h in seen]).mean(0)
            torch.testing.assert_close(found[f"{layer}.running_mean"], mean.detach())
            torch.testing.assert_close(found[f"{layer}.running_var"], variance.detach())
            assert int(found[f"{layer}.num_batches_tracked"]) == len(seen)


def test_a_layer_that_no_pass_may_teach_keeps_its_running_statistics() -> None:
    """In the first eight steps only the class that near_input denies is offered."""
    case = Case(Watched, ("0.*", "1.*"), ("3.*", "4.*", "5.*"))
    rules = (
        "[{class: open, phase: second, weight: 1}, {class: open, phase: first, decision: reject},"
        " {class: doubtful, region: near_input, weight: 0}, {class: doubtful, region: near_output, weight: 1}]\n"
        "phases: [{name: first, until: 8ba}, {name: second}]"
    )
    averages = [EMA(half_life="2ba", update_interval="1ba")]
    trainer = trained(case, [SGD(lr=0.1)], averages, num_steps=10, rules=rules)
    running = trainer.model[1].running_mean.clone()
    assert running.any()
    with trainer.averaged() as model:
        assert torch.equal(model[1].running_mean, running)
        assert int(model[4].num_batches_tracked) == 16
