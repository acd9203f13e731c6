"""When averages of weights are updated, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Budget, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Method
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.methods import EMA, SWA, LayerFreezing
from cosmati.methods.building_blocks.averaging import (
    approach,
    averages_of,
    check_times,
    interval_of,
    note_moved,
    start_averages,
    steps_of,
)
from cosmati.optim import AdamW
from cosmati.testing.pieces import weights_of
from cosmati.train.config import RunConfig
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train.elastic_worker import StopAt


def budget(span: str = "100ba", **options: float) -> Budget:
    return Budget(Time.parse(span), **options)  # type: ignore[arg-type]


def test_spans_are_counted_in_steps_of_the_dilated_run() -> None:
    assert steps_of("10ba", budget()) == 10
    assert steps_of("10ba", budget(ratio=2.0)) == 20
    assert steps_of("0.25dur", budget(ratio=2.0)) == 50
    assert steps_of("2ep", budget("10ep", steps_per_epoch=7)) == pytest.approx(14)
    assert steps_of("0.015dur", budget()) == 1.5, "not rounded"
    assert steps_of("0ep", budget()) == 0


def test_steps_are_steps_where_the_runs_length_is_not_known() -> None:
    unknown = budget("90sec", ratio=2.0)
    assert steps_of("10ba", unknown) == 20
    assert steps_of("0ep", unknown) == 0
    with pytest.raises(PlanError, match="no step number"):
        steps_of("0.5dur", unknown)


def test_an_interval_is_whole_and_at_least_a_step() -> None:
    assert [interval_of(text, budget()) for text in ("0ba", "0.3ba", "2ba", "0.026dur")] == [1, 1, 2, 3]


def test_the_hosts_clock_times_no_average() -> None:
    check_times("EMA", "10ba", None, "0.1dur")
    with pytest.raises(PlanError, match=r"EMA can't be timed by the host's clock \('3sec'\)"):
        check_times("EMA", "10ba", "3sec")


def model() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 3).bfloat16(), nn.Linear(3, 1).double())
    net[0].bias.requires_grad_(False)
    return net


def test_averages_start_as_wide_copies_of_what_learns() -> None:
    net = model()
    state = start_averages(weights_of(net), 1)
    averages = averages_of(state)
    assert set(averages) == {"0.weight", "1.weight", "1.bias"} == {key.removeprefix("average/") for key in state}
    assert [averages[name].dtype for name in ("0.weight", "1.weight")] == [torch.float32, torch.float64]
    for name, average in averages.items():
        parameter = net.get_parameter(name)
        assert torch.equal(average, parameter.to(average.dtype))
        assert average.data_ptr() != parameter.data_ptr()
        assert not average.requires_grad
    flags = start_averages(weights_of(net), 2)["moved"]
    assert (flags.dtype, flags.tolist()) == (torch.bool, [False] * 3)


def test_what_moved_since_the_last_update_is_in_the_next() -> None:
    state = start_averages(weights_of(model()), 3)
    order = list(averages_of(state))
    state, names = note_moved(state, order, frozenset({order[1]}), is_due=False)
    assert (names, state["moved"].tolist()) == ([], [False, True, False])
    state, names = note_moved(state, order, frozenset({order[2]}), is_due=True)
    assert (names, state["moved"].tolist()) == ([order[1], order[2]], [False] * 3)
    state, names = note_moved(state, order, None, is_due=True)
    assert names == order


def test_at_every_step_there_is_nothing_to_remember() -> None:
    state = start_averages(weights_of(model()), 1)
    order = list(averages_of(state))
    assert note_moved(state, order, None, is_due=True) == (state, order)
    assert note_moved(state, order, frozenset({order[0]}), is_due=True)[1] == [order[0]]
    assert note_moved(state, order, None, is_due=False)[1] == []


def test_averages_go_their_share_of_the_way() -> None:
    averages = [torch.tensor([0.0, 4.0]), torch.tensor([1.0], dtype=torch.float64)]
    weights = [torch.tensor([8.0, 4.0]).bfloat16(), torch.tensor([2.0], dtype=torch.float64)]
    approach(averages, weights, 0.25)
    assert [average.tolist() for average in averages] == [[2.0, 4.0], [1.25]]
    approach(averages, weights, [0.5, 0.0])
    assert [average.tolist() for average in averages] == [[5.0, 4.0], [1.25]]
    approach([], [], 0.5)
    with pytest.raises(ValueError, match="zip"):
        approach(averages, weights, [0.5])


class Staged(nn.Module):
    """Its parameters' names aren't in their own order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x).relu()).relu())


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [EMA(half_life="2ba", update_interval="3ba"), SWA(swa_start="1ba", update_interval="1ba")],
    ids=lambda method: type(method).__name__,
)
def test_what_has_moved_is_known_by_name_after_a_resume(tmp_path: Path, method: Method) -> None:
    """Some parameters freeze in the run: flags and counts are each parameter's own; checkpoints sort names."""

    def trained(folder: Path, stops: Sequence[int]) -> dict[str, Tensor]:
        for stop in stops:
            torch.manual_seed(0)
            data = InMemory((torch.randn(48, 4), torch.randint(2, (48,))), 6)
            config = RunConfig(budget="8ba", num_microbatches=1, num_threads=1, run_folder=folder)
            methods = [method, LayerFreezing(freeze_start=0.1, freeze_level=1.0)]
            optimizers = AdamW(lr=1e-2)
            given = {"optimizers": optimizers, "methods": methods, "observers": [StopAt(stop)], "config": config}
            Trainer(Staged(), Classification(2), data, **given).fit()
        return dict(read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).state)

    whole, resumed = trained(tmp_path / "whole", [0]), trained(tmp_path / "resumed", [2, 4, 0])
    assert whole.keys() == resumed.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, resumed[name])] == []
    counts = [value for name, value in whole.items() if name.endswith("counts")]
    assert all(len(set(one.tolist())) > 1 for one in counts), "they aren't all alike"
