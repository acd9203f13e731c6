"""One rank of `test_hostile_ranks.py`: prints digests of odd models after three steps as JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from cosmati.core.loss import Classification, LossFunction
from cosmati.core.method import Method
from cosmati.core.state import parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.methods import SAM, SelectiveBackprop
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.train.test_hostile_gradients import SharedMemory, Silent, attacked, littered, plain

TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("late", "not yet")))
POLICY = """
version: 1
taxonomy: t
phases: [{name: early, until: 2ba}, {name: later}]
rules:
  - {class: open, weight: 0.75}
  - {class: late, weight: 1}
  - {class: late, phase: early, decision: defer}
"""


def run(
    make: Callable[[], nn.Module], loss: LossFunction, methods: Sequence[Method] = (), *, governed: bool = True
) -> str:
    """Train one case; its microbatches are of both classes in turn."""
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(96, 5, generator=generator), torch.randint(3, (96,), generator=generator))
    torch.manual_seed(0)
    model = make()
    Trainer(
        model,
        loss,
        InMemory(data, 16, class_ids=torch.arange(96) % 2, class_names=("open", "late")),
        optimizers=[SGD(lr=0.5, momentum=0.9)],
        methods=methods,
        policy=load_policy(POLICY) if governed else None,
        taxonomy=TAXONOMY if governed else None,
        config=RunConfig(budget="5ba", num_microbatches=4, num_threads=1),
    ).fit()
    return parameter_root(dict(model.state_dict())).hex()


def main() -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The loss has left gradients behind")  # `littered` does
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    chosen = SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)
    found = {
        "shared memory": run(SharedMemory, plain),
        "shared memory, without a policy": run(SharedMemory, plain, [SAM()], governed=False),
        "silent": run(Silent, plain),
        "attacked": run(SharedMemory, attacked),
        "littered": run(Silent, littered, governed=False),
        "float64": run(_Double, plain),
        "smaller where offered": run(SharedMemory, Classification(3), [chosen]),
    }
    if os.environ["RANK"] == "0":
        sys.stdout.write(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


class _Double(nn.Module):
    """Trains in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SharedMemory().double()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(input.double())
        return output


if __name__ == "__main__":
    main()
