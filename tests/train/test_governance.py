"""The promise `no_direct_write`: what a denied class holds never moves a region that denies it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.data.in_memory import InMemory
from cosmati.methods import GradientClipping
from cosmati.optim import SGD, AdamW, Optimizer
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

POLICY = """
version: 1
taxonomy: t
regions:
  near_input: {params: ["0.*", "1.*"]}
  near_output: {params: ["3.*"]}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 1}
"""


def _train(swapped: bool, optimizer: Optimizer, *methods: GradientClipping) -> tuple[Trainer, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator)
    classes = (torch.arange(64) % 4 == 0).long()
    if swapped:
        inputs[classes == 1] = inputs[classes == 1] * 30 + 7
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    trainer = Trainer(
        model,
        Classification(num_classes=3),
        InMemory((inputs, targets), 16, class_ids=classes, class_names=("open", "doubtful")),
        optimizers=[optimizer],
        methods=methods,
        policy=load_policy(POLICY),
        taxonomy=Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output"))),
        config=RunConfig(budget="1ba", num_microbatches=4, num_threads=1),
    )
    trainer.fit()
    return trainer, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.01, weight_decay=0.1), SGD(lr=0.1, momentum=0.9)])
def test_the_content_of_a_denied_class_moves_nothing(optimizer: Optimizer) -> None:
    _, one = _train(False, optimizer)
    trainer, other = _train(True, optimizer)
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert changed == {"3.weight", "3.bias"}
    assert any(g.holds for g in trainer.plan.guarantees if g.name.startswith("no_direct_write"))


def test_clipping_by_the_global_norm_couples_regions() -> None:
    """The control: the plan says that the promise is broken, and it is."""
    clipping = GradientClipping(clipping_type="norm", clipping_threshold=0.01)
    _, one = _train(False, SGD(lr=0.1), clipping)
    trainer, other = _train(True, SGD(lr=0.1), clipping)
    assert not torch.equal(one["0.weight"], other["0.weight"])
    found = [g for g in trainer.plan.guarantees if g.name.startswith("no_direct_write")]
    assert found
    assert not any(g.holds for g in found)
