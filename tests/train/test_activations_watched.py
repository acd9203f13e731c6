"""Statistics of what layers put out, against those of the whole outputs; hooks stand in measured steps alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.clock import Clock
from cosmati.train.observers.monitors.activations import ActivationStatistics


def watched(model: nn.Module, *args: Any, **options: Any) -> ActivationStatistics:
    watch = ActivationStatistics(*args, **options)
    watch.open(SimpleNamespace(model=model))  # type: ignore[arg-type]
    return watch


def seen(watch: ActivationStatistics, model: nn.Module, rows: torch.Tensor, number: int = 1) -> dict[str, float]:
    watch.before(Clock(), number)
    model(rows)
    outcome: Any = None
    found = {name: value.tolist() for name, value in watch.measure(outcome).items()}  # type: ignore[union-attr]
    watch.end()
    return dict(watch.judge(found, outcome))


def test_small_outputs_are_looked_at_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    rows = torch.randn(8, 3)
    found = seen(watched(model), model, rows)
    first = nn.functional.linear(rows, model[0].weight, model[0].bias).detach()
    outputs = {"0": first, "1": first.relu(), "2": model[2](first.relu()).detach()}
    expected = {
        f"activation/{name}/{what}": pytest.approx(value, rel=1e-5)
        for name, one in outputs.items()
        for what, value in (
            ("rms", float(one.square().mean().sqrt())),
            ("max", float(one.abs().max())),
            ("zeros", float((one == 0).float().mean())),
        )
    }
    assert found == expected


def test_of_large_outputs_a_thousand_numbers_of_the_first_rows_are_taken() -> None:
    class Gives(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows

    model = Gives()
    for shape, first in (((64, 512), 2 * 512), ((3, 5000), 5000), ((4096,), 4096)):
        rows = torch.arange(float(torch.Size(shape).numel())).view(shape)
        found = seen(watched(model), model, rows)
        step = max(1, first // 1024)
        taken = rows.reshape(-1)[:first:step][:1024]
        assert found["activation/model/max"] == float(taken.max())
        assert found["activation/model/rms"] == pytest.approx(float(taken.square().mean().sqrt()), rel=1e-5)
        assert found["activation/model/zeros"] == pytest.approx(1 / len(taken), rel=1e-4)


def test_layers_are_chosen_evenly_by_their_names() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(10)))
    for most, chosen in ((10, range(10)), (3, (0, 3, 6)), (1, (0,)), (20, range(10))):
        found = seen(watched(model, max_layers=most), model, torch.ones(2))
        assert {name.split("/")[1] for name in found} == {str(one) for one in chosen}
    assert {name.split("/")[1] for name in seen(watched(model, ("3", "[78]")), model, torch.ones(2))} == {"3", "7", "8"}


def test_a_hook_stands_in_each_so_many_measurements() -> None:
    model = nn.Identity()
    watch = watched(model, every=3)
    before = len(nn.modules.module._global_forward_hooks)
    looked = []
    for number in range(1, 9):
        watch.before(Clock(), number)
        looked.append(len(nn.modules.module._global_forward_hooks) - before)
        watch.before(Clock(), number)
        watch.end()
        assert len(nn.modules.module._global_forward_hooks) == before
    assert looked == [1, 0, 0, 1, 0, 0, 1, 0]
    assert seen(watched(nn.Embedding(3, 2)), nn.Identity(), torch.ones(2)) == {}


@pytest.mark.parametrize("given", [{"max_layers": 0}, {"every": 0}])
def test_numbers_that_cannot_be_are_refused(given: dict[str, int]) -> None:
    ActivationStatistics(max_layers=1, every=1)
    with pytest.raises(ValueError, match="both are at least 1"):
        ActivationStatistics(**given)


OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": torch.Tensor.to_sparse,
    "in rows": torch.Tensor.to_sparse_csr,
    "nested": lambda rows: torch.nested.nested_tensor([rows, rows[:1]], layout=torch.jagged),
    "whole numbers": torch.Tensor.long,
    "none": lambda rows: rows[:0],
}


class Puts(nn.Module):
    """Puts out something that most layers don't."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return OUTPUTS[self.kind](rows)


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
def test_what_has_no_floats_in_rows_is_passed_over(kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Puts(kind))
    assert {name.split("/")[1] for name in seen(watched(model), model, torch.ones(2, 3))} == {"0"}


def test_a_layer_under_vmap_is_passed_over() -> None:
    model = nn.Linear(3, 3)
    watch = watched(model)
    watch.before(Clock(), 1)
    torch.func.vmap(model)(torch.ones(2, 4, 3))
    assert watch.measure(None) == {}  # type: ignore[arg-type]
    watch.end()
