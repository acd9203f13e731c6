"""The delete test: a class present against tombstoned, and every other region in bits."""

from __future__ import annotations

import pytest
import torch

from cosmati.data.tombstoned import Tombstoned
from tests.train.isolated.samples import CASES, OPTIMIZERS, differing, fitted, others, promise, sampled, source


@pytest.mark.parametrize(("name", "optimizer"), sampled(CASES, list(OPTIMIZERS)))
def test_a_class_leaves_nothing_outside_of_its_own(name: str, optimizer: str) -> None:
    case, data = CASES[name], source(CASES[name])
    present = fitted(case, data, OPTIMIZERS[optimizer]())
    gone = fitted(case, Tombstoned(data, classes=["personal"]), OPTIMIZERS[optimizer]())
    assert promise(present).holds, promise(present)
    assert not differing(others(present), others(gone))
    own = present.assembly.regions.parameters[1]
    learnt = [n for n in own if not torch.equal(present.model.state_dict()[n], gone.model.state_dict()[n])]
    assert len(learnt) == len(own)
