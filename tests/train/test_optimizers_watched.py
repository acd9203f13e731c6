"""What is done to optimizers beside their steps, and what they keep beside groups and state, breaks promises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from cosmati.core.plan import Facts, Promise, make_plan
from cosmati.errors import CheckpointError
from cosmati.train.optimizer_watch import OptimizerWatch

FACTS = Facts(num_microbatches=1, rows_per_microbatch=1, positional_data=True, denied=(("a", "r"),), has_ledger=True)
PLAN = make_plan([], FACTS)
OF_RESUMES = {Promise.RESUME, Promise.REPLAYABLE}


def broken(watch: OptimizerWatch) -> tuple[set[Promise], set[str]]:
    """Promises that held before and don't now, and why."""
    now = watch.judged(PLAN)
    gone = [two for one, two in zip(PLAN.guarantees, now.guarantees, strict=True) if one.holds and not two.holds]
    return {one.promise for one in gone}, {one.because for one in gone}


def scheduled(optimizer: torch.optim.Optimizer, *, schedule: object = None) -> Any:
    rates = [group["lr"] for group in optimizer.param_groups]
    return SimpleNamespace(optimizer=optimizer, schedule=schedule, base_rates=rates)


class Own(torch.optim.SGD):
    """Somebody's, which counts for itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.taken = 0
        self.weight = parameters[0]


def test_a_rate_that_is_changed_from_outside_breaks_what_is_promised() -> None:
    weight = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    watch = OptimizerWatch([scheduled(optimizer)])
    assert broken(watch) == (set(), set())
    optimizer.param_groups[0]["lr"] = 0.05
    promises, why = broken(watch)
    assert promises == OF_RESUMES | {Promise.NO_DIRECT_WRITE}
    assert why == {"the learning rate of SGD is changed from outside, by what no checkpoint holds"}
    # A schedule sets it, and an optimizer of the user's own may.
    assert broken(OptimizerWatch([scheduled(optimizer, schedule="one")])) == (set(), set())
    own = Own([weight])
    watch = OptimizerWatch([scheduled(own)])
    own.param_groups[0]["lr"] = 0.05
    assert broken(watch) == (set(), set())


def test_a_hook_breaks_it_too() -> None:
    optimizer = torch.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
    watch = OptimizerWatch([scheduled(torch.optim.SGD([Parameter(torch.ones(2))], lr=0.1)), scheduled(optimizer)])
    assert broken(watch) == (set(), set())
    optimizer.register_step_pre_hook(lambda *_: None)
    promises, (why,) = broken(watch)
    assert promises == OF_RESUMES | {Promise.NO_DIRECT_WRITE}
    assert why.startswith("SGD ")


def test_what_an_optimizer_of_ones_own_keeps_beside_its_state_is_in_no_checkpoint() -> None:
    weight = Parameter(torch.ones(2))
    own = Own([weight])
    watch = OptimizerWatch([scheduled(own)])
    with torch.no_grad():
        weight.add_(1)  # that's what it's for
    own.state[weight]["anything"] = torch.ones(1)
    assert broken(watch) == (set(), set())
    own.taken += 1
    promises, why = broken(watch)
    assert promises == OF_RESUMES, "no row's loss may be in it"
    assert why == {"Own.taken isn't in a checkpoint: of an optimizer it holds groups and state"}
    own.new = 3
    assert broken(watch)[1] == {"Own.new, Own.taken isn't in a checkpoint: of an optimizer it holds groups and state"}


@pytest.mark.parametrize("index", [0, 1])
def test_of_two_optimizers_of_one_class_each_is_watched(index: int) -> None:
    own = [Own([Parameter(torch.ones(2))]) for _ in range(2)]
    watch = OptimizerWatch([scheduled(one) for one in own])
    assert broken(watch) == (set(), set())
    own[index].taken += 1
    told = {"Own.taken isn't in a checkpoint: of an optimizer it holds groups and state"}
    assert broken(watch) == (OF_RESUMES, told)
    own[1 - index].taken += 1
    assert broken(watch)[1] == told, "once"


def test_state_that_is_sparse_is_refused_by_name() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = OptimizerWatch([scheduled(torch.optim.SGD([Parameter(torch.ones(1))], lr=0.1)), scheduled(optimizer)])
    named = dict(model.named_parameters())
    optimizer.state[model.weight]["dense"] = torch.ones(1, 2)
    optimizer.state[model.weight]["count"] = 3
    assert list(watch.tensors(named)) == ["optimizer/1/weight/dense"]
    watch.refuse_unsavable(named)
    optimizer.state[model.bias]["odd"] = torch.ones(2, 2).to_sparse()
    with pytest.raises(CheckpointError, match=r"can hold optimizer/1/bias/odd \(torch.sparse_coo\)"):
        watch.refuse_unsavable(named)
