"""What ranks compare is the same in every process: Python orders a set's strings by a number that each draws."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.processes import run_python

pytestmark = pytest.mark.long

SCRIPT = """
from dataclasses import dataclass
import torch
from torch import nn
from cosmati import Method, RunConfig, Stage, Trainer
from cosmati.train.values import content_of


@dataclass(frozen=True, kw_only=True)
class Named(Method):
    stage = Stage.PERTURB
    names: frozenset = frozenset()

    def batch(self, batch, at):
        return batch


sets = {*"abcdefgh"}, {frozenset("abc"), frozenset("def"), frozenset("ghi")}, {*map(str, range(20_000))}
names = frozenset({"a", "bb", "ccc", "d"})
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD([{"params": model.parameters(), "tags": set(names)}], lr=0.1)
config = RunConfig(budget="1ba")
methods = [Named(names=names)]
trainer = Trainer(model, lambda m, d: m(d).sum(), optimizers=[optimizer], methods=methods, config=config)
print(sets[0], sorted(trainer.prepared.identity.items()), *map(content_of, sets), sep="\\n")
"""


def test_sets_are_described_and_compared_alike_in_every_process() -> None:
    # A fork has the number that this process drew, or was given.
    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    anew = subprocess.check_output([sys.executable, "-c", SCRIPT], text=True, env=environment)
    fork = run_python(["-c", SCRIPT])
    assert fork.returncode == 0, fork.stderr
    order, identity, *contents = zip(anew.splitlines(), fork.stdout.splitlines(), strict=True)
    assert len({*order}) == 2, "the control"
    assert len({*identity}) == 1
    assert identity[0].count("'ccc'") >= 2, "the method's names and the optimizer's tags"
    assert [len({*one}) for one in contents] == [1, 1, 1]
