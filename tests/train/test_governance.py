"""The promise `no_direct_write`: what a denied class holds never moves a region that denies it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.data.in_memory import InMemory
from cosmati.methods import GradientClipping
from cosmati.optim import SGD, AdamW, Optimizer
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.assembly import SubStep
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer

TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output")))
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
        taxonomy=TAXONOMY,
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
    assert any(g.holds for g in trainer.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE)


def test_clipping_by_the_global_norm_couples_regions() -> None:
    """The control: the plan says that the promise is broken, and it is."""
    clipping = GradientClipping(clipping_type="norm", clipping_threshold=0.01)
    _, one = _train(False, SGD(lr=0.1), clipping)
    trainer, other = _train(True, SGD(lr=0.1), clipping)
    assert not torch.equal(one["0.weight"], other["0.weight"])
    found = [g for g in trainer.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    assert found
    assert not any(g.holds for g in found)


def _halves(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


@pytest.mark.parametrize("num_sub_steps", [1, 2])
def test_the_promise_is_not_made_with_alternating_losses(num_sub_steps: int) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator))
    globs = ["0.*", "[13].*"] if num_sub_steps == 2 else ["*"]
    trainer = Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        [SubStep(f"step {glob}", _halves, glob) for glob in globs],
        InMemory(rows, 16, class_ids=(torch.arange(64) % 4 == 0).long(), class_names=("open", "doubtful")),
        optimizers=[SGD(lr=0.1, parameters=glob) for glob in globs],
        policy=load_policy(POLICY),
        taxonomy=TAXONOMY,
        config=RunConfig(budget="1ba", num_microbatches=4, num_threads=1),
    )
    assert trainer.plan.holds(Promise.NO_DIRECT_WRITE, ("doubtful", "near_input")) == (num_sub_steps == 1)


class Classes(Observer):
    """Counts the rows of each class that took part."""

    def __init__(self) -> None:
        self.counts = {0: 0, 1: 0}

    def on_step(self, report: StepReport) -> None:
        assert report.num_rows is not None
        for batch, num_rows in zip(report.batches, report.num_rows.tolist(), strict=True):
            self.counts[int(batch.lineage.class_ids[0])] += int(num_rows)


@pytest.mark.parametrize("weight", [1, 0.25])
def test_a_class_that_is_only_ever_attenuated_takes_part(weight: float) -> None:
    rules = f"rules: [{{class: open, weight: 1}}, {{class: doubtful, weight: {weight}}}]"
    seen = Classes()
    rows = (torch.zeros(64, 4), torch.zeros(64, dtype=torch.int64))
    Trainer(
        nn.Linear(4, 3),
        Classification(3),
        InMemory(rows, 16, class_ids=(torch.arange(64) % 4 == 0).long(), class_names=("open", "doubtful")),
        optimizers=[SGD(lr=0.1)],
        policy=load_policy(f"version: 1\ntaxonomy: t\n{rules}\n"),
        taxonomy=TAXONOMY,
        observers=[seen],
        config=RunConfig(budget="1ep", num_microbatches=4, num_threads=1),
    ).fit()
    assert seen.counts == {0: 48, 1: 16}
