"""Which layers have running statistics that are folded, what couples rows beside them, and where they lie."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati.routing.regions import Regions, partition_parameters
from cosmati.train.buffers import BatchNormStatistics, LayerStatistic, unrouted
from cosmati.train.ranks import Ranks

ROWS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Counted(nn.BatchNorm1d):
    """A plain BatchNorm that counts its calls for all its kind."""

    calls: ClassVar[list[int]] = [0]

    def forward(self, rows: Tensor) -> Tensor:
        Counted.calls[0] += 1
        return super().forward(rows)


def test_a_trial_leaves_no_trace_in_what_a_class_keeps() -> None:
    layer = Counted(3)
    assert list(BatchNormStatistics(nn.Sequential(layer)).layers) == ["0"]
    assert Counted.calls == [0]
    layer(ROWS)
    assert Counted.calls == [1]
    Counted.calls[0] = 0


class Refusing(nn.BatchNorm1d):
    """Takes no rows."""

    def forward(self, rows: Tensor) -> Tensor:
        raise ValueError


class Broken(nn.BatchNorm1d):
    """Isn't finished."""

    def forward(self, rows: Tensor) -> Tensor:
        raise NotImplementedError


def test_what_cannot_be_tried_is_not_folded() -> None:
    statistics = BatchNormStatistics(nn.Sequential(Refusing(3), Broken(3)))
    assert (list(statistics.layers), statistics.unlike) == ([], ["0", "1"])
    assert statistics.row_coupled == ("0", "1")


def test_a_forward_of_a_layers_own_is_tried() -> None:
    plain, moved = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    moved.forward = lambda rows: rows + moved.running_mean  # type: ignore[method-assign]
    statistics = BatchNormStatistics(nn.Sequential(plain, moved))
    assert (list(statistics.layers), statistics.unlike) == (["0"], ["1"])


class Scaled(nn.BatchNorm1d):
    """A plain BatchNorm, and something after it."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).relu()


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_a_layer_of_any_momentum_is_tried_by_one(momentum: float | None) -> None:
    layer = Scaled(3, momentum=momentum)
    statistics = BatchNormStatistics(nn.Sequential(layer))
    assert (list(statistics.layers), statistics.rounded) == (["0"], ())
    assert layer.momentum == momentum


class Scaled2d(nn.BatchNorm2d):
    """Takes images alone."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).relu()


class Scaled3d(nn.BatchNorm3d):
    """Takes volumes alone."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).relu()


def test_a_layer_is_tried_by_rows_of_a_shape_that_it_takes() -> None:
    statistics = BatchNormStatistics(nn.Sequential(Scaled(3), Scaled2d(3), Scaled3d(3)))
    assert (list(statistics.layers), statistics.unlike) == (["0", "1", "2"], [])


def test_layers_without_statistics_are_left_out() -> None:
    statistics = BatchNormStatistics(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)))
    assert (statistics.layers, statistics.unlike, statistics.row_coupled, statistics.rounded) == ({}, [], (), ())
    assert (statistics.own, statistics.copied()) == ([], [])


def test_modules_that_say_that_they_couple_rows_are_named_after_the_layers() -> None:
    class Says(nn.Module):
        couples: object = frozenset({"rows"})

    class Other(nn.Module):
        couples = ("regions",)

    class Number(nn.Module):
        couples = 3

    model = Says()
    model.a, model.b, model.c = Says(), Other(), Number()
    model.norm = nn.BatchNorm1d(3)
    statistics = BatchNormStatistics(model)
    assert statistics.row_coupled == ("norm", "the model", "a")
    assert statistics.rounded == ()


def test_own_statistics_are_means_and_variances_and_copies_have_the_count_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    statistics = BatchNormStatistics(model)
    first, second = model[0], model[1]
    for own, expected in zip(
        statistics.own,
        [first.running_mean, first.running_var, second.running_mean, second.running_var],
        strict=True,
    ):
        assert own is expected
    copies = statistics.copied()
    model(ROWS)
    assert [one.tolist() for one in copies] == [[0.0] * 3, [1.0] * 3, 0] * 2
    statistics.put_back(copies)
    assert int(first.num_batches_tracked) == int(second.num_batches_tracked) == 0


def test_a_layer_that_runs_twice_in_a_microbatch_is_named_and_its_last_pass_counts() -> None:
    once, twice = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    statistics = BatchNormStatistics(nn.Sequential(once, twice))
    with statistics.captured():
        mark = statistics.clear()
        once(ROWS)
        twice(ROWS)
        assert statistics.repeated == set()
        twice(ROWS * 2)
        row = statistics.read(mark)
    assert statistics.repeated == {"1"}
    torch.testing.assert_close(row[8:11], 2 * ROWS.mean(0))
    assert (float(row[0]), float(row[7])) == (1.0, 1.0)
    assert row.dtype is torch.float32


def test_each_microbatch_begins_with_the_running_statistics() -> None:
    layer = nn.BatchNorm1d(3)
    layer(ROWS)
    before = [layer.running_mean.clone(), layer.running_var.clone()]  # type: ignore[union-attr]
    statistics = BatchNormStatistics(nn.Sequential(layer))
    with statistics.captured():
        for _ in range(2):
            mark = statistics.clear()
            assert torch.equal(layer.running_mean, before[0])  # type: ignore[arg-type]
            assert torch.equal(layer.running_var, before[1])  # type: ignore[arg-type]
            assert int(layer.num_batches_tracked) == 1  # type: ignore[arg-type]
            layer(ROWS + 1)
            assert float(statistics.read(mark)[0]) == 1.0
        mark = statistics.clear()
        assert statistics.read(mark).tolist() == [0.0] * 7
    assert torch.equal(layer.running_mean, before[0])  # type: ignore[arg-type]


def test_what_is_not_counted_leaves_the_count_and_moves_the_rest() -> None:
    layer = nn.BatchNorm1d(2, momentum=0.5)
    statistics = BatchNormStatistics(nn.Sequential(layer))
    mean, variance = torch.tensor([2.0, 4.0]), torch.tensor([3.0, 5.0])
    statistics.fold([LayerStatistic("0", mean, variance, is_counted=False)])
    assert (layer.running_mean.tolist(), layer.running_var.tolist()) == ([1.0, 2.0], [2.0, 3.0])  # type: ignore[union-attr]
    assert int(layer.num_batches_tracked) == 0  # type: ignore[arg-type]
    statistics.fold([LayerStatistic("0", mean, variance, is_counted=True)] * 2)
    assert layer.running_mean.tolist() == [1.75, 3.5]  # type: ignore[union-attr]
    assert int(layer.num_batches_tracked) == 2  # type: ignore[arg-type]


def test_a_layer_that_is_given_its_rows_by_name_reads_no_narrow_ones() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    statistics = BatchNormStatistics(model)
    with statistics.captured():
        mark = statistics.clear()
        model[0](input=ROWS)
        row = statistics.read(mark)
    (told,) = statistics.taught([row], Ranks.alone(), lambda index, name: (index, name) == (0, "0"))
    assert told.is_counted
    torch.testing.assert_close(told.mean, ROWS.mean(0))
    torch.testing.assert_close(told.variance, ROWS.var(0))
    assert statistics._reads_narrow == {"0": False}
    assert statistics.taught([row], Ranks.alone(), lambda *_: False) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_a_layer_reads_is_narrow_in_sixteen_bits(dtype: torch.dtype) -> None:
    statistics = BatchNormStatistics(nn.Sequential(nn.BatchNorm1d(3)))
    statistics._see("0", nn.Identity(), (ROWS.to(dtype),))
    assert statistics._reads_narrow == {"0": dtype is not torch.float32}


def test_statistics_that_lie_in_no_one_region_are_said_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
    names = [name for name, _ in model.named_parameters()]
    two = Regions(("a", "b"), (tuple(names[:4]), tuple(names[4:])), (("a",), ("b",)))
    statistics = BatchNormStatistics(model)
    assert unrouted(statistics, two) == ("the statistics of 2 lie in no one region",)
    assert unrouted(statistics, partition_parameters(model)) == ()
    alone = nn.BatchNorm1d(3)
    assert unrouted(BatchNormStatistics(alone), partition_parameters(alone)) == ()
