"""Whole runs with a strategy: they resume with the same bits, and their ledgers verify and answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmati.core.method import Method
from cosmati.core.plan import Promise
from cosmati.ledger.verify import verify_ledger
from cosmati.methods import EMA, DepthCurriculum, GradientClipping, LayerFreezing, SelectiveBackprop
from cosmati.optim import AdamW
from tests.methods.cases import StopAt, everything, same
from tests.train.strategies.samples import Net, microbatches, trainer
from tests.train.strategies.whole_runs import BOTH, KINDS, whole_run

pytestmark = pytest.mark.long

each = pytest.mark.parametrize("method", BOTH, ids=lambda method: type(method).__name__)


@each
def test_stopped_and_resumed_with_the_same_bits(method: Method, tmp_path: Path) -> None:
    whole = whole_run(method)
    whole.fit()
    stopped = whole_run(method, tmp_path, observers=[StopAt(2)])
    assert stopped.fit().outcome == "stopped"
    resumed = whole_run(method, tmp_path)
    assert resumed.fit().outcome == "completed"
    assert same(everything(resumed), everything(whole))
    verify_ledger(tmp_path / "ledger")


def test_they_train_to_bits_of_their_own() -> None:
    ends = []
    for method in BOTH:
        run = whole_run(method)
        run.fit()
        ends.append(run.model.state_dict()["stem.weight"])
    assert not torch.equal(*ends)


@each
@pytest.mark.parametrize(
    "beside",
    [
        LayerFreezing(freeze_start=0.2),
        DepthCurriculum(end=0.8),
        EMA(half_life="2ba"),
        SelectiveBackprop(start=0.0, end=1.0),
        GradientClipping(clipping_type="norm", clipping_threshold=0.01, per_region=True),
    ],
    ids=lambda method: type(method).__name__,
)
def test_beside_other_methods_a_denied_class_writes_nothing(method: Method, beside: Method) -> None:
    """Its rows hold something else in the last step of one of the runs: what denies it ends with the same bits."""
    ends = []
    for swapped in ("", "gone"):
        network = Net()
        with trainer(network, KINDS, method, beside, optimizers=[AdamW(lr=0.01, weight_decay=0.1)]) as run:
            for step in range(4):
                batches = microbatches(seed=step, swapped=swapped if step == 3 else "")
                run.step_microbatches(batches, [batch.class_id for batch in batches])
            assert run.plan.holds(Promise.NO_DIRECT_WRITE)
            ends.append(everything(run))
    one, other = ends
    moved = {name for name in one if not torch.equal(one[name], other[name])}
    assert not [name for name in moved if name.split("/")[-1].startswith(("side.", "head."))]
    assert [name for name in moved if "extra." in name or "stem." in name]
