"""BatchNorm's statistics, without a trainer: captured for each microbatch, folded as PyTorch would have."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.train.buffers import BatchNormStatistics
from cosmati.train.ranks import Ranks


class Two(nn.Module):
    """Two layers of different width, the second of which runs only where rows are positive."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3, momentum=momentum)
        self.second = nn.BatchNorm1d(2, momentum=momentum)
        self.plain = nn.BatchNorm1d(3, track_running_stats=False)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.plain(self.first(rows))
        return self.second(rows[:, :2].contiguous()) if rows.mean() > 0 else hidden


def _microbatches(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 3, generator=generator) + (2.0 if i % 3 else -2.0) for i in range(num)]


def _read(model: nn.Module, statistics: BatchNormStatistics, data: list[Tensor]) -> list[Tensor]:
    rows = []
    with statistics.captured():
        for one in data:
            mark = statistics.clear()
            model(one)
            rows.append(statistics.read(mark))
    return rows


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_folding_gives_the_bits_of_forward_passes_one_after_another(momentum: float | None) -> None:
    model, data = Two(momentum), _microbatches(8)
    native = copy.deepcopy(model)
    for one in data:
        native(one)
    statistics = BatchNormStatistics(model)
    statistics.fold(statistics.taught(_read(model, statistics, data), Ranks(), lambda index, layer: True))
    assert list(statistics.layers) == ["first", "second"]
    assert [int(layer.num_batches_tracked) for layer in (model.first, model.second)] == [8, 5]
    for name, value in native.named_buffers():
        assert torch.equal(value, dict(model.named_buffers())[name]), name
    assert (model.first.momentum, model.second.momentum) == (momentum, momentum)


def test_only_microbatches_that_may_teach_a_layer_are_folded() -> None:
    model, data = Two(0.1), _microbatches(6)
    native = copy.deepcopy(model)
    for one in data[2:4]:
        native.first(one)
    native.second(data[5][:, :2].contiguous())
    statistics, asked = BatchNormStatistics(model), []

    def teaches(index: int, layer: str) -> bool:
        asked.append((index, layer))
        return index in {"first": (2, 3), "second": (0, 5)}[layer]  # the second doesn't run in microbatch 0

    statistics.fold(statistics.taught(_read(model, statistics, data), Ranks(), teaches))
    assert asked == [(index, layer) for index in range(6) for layer in ("first", "second")]
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), native.buffers(), strict=True))


def test_what_is_read_are_a_flag_means_and_variances_of_each_layer() -> None:
    model = Two(0.1)
    statistics = BatchNormStatistics(model)
    for one, row in zip(_microbatches(2), _read(model, statistics, _microbatches(2)), strict=True):
        runs = one.mean() > 0
        second = [one[:, :2].mean(0), one[:, :2].var(0)] if runs else [torch.zeros(2), torch.zeros(2)]
        expected = [torch.ones(1), one.mean(0), one.var(0), torch.full((1,), float(runs)), *second]
        torch.testing.assert_close(row, torch.cat(expected))


def test_a_pass_within_leaves_no_trace_also_where_it_fails() -> None:
    model = Two(0.1)
    model(_microbatches(1)[0])
    before = [buffer.clone() for buffer in model.buffers()]
    statistics = BatchNormStatistics(model)

    def fails() -> None:
        model(_microbatches(2)[1])
        assert model.first.momentum == 1.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), statistics.captured():
        fails()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
    assert model.first.momentum == 0.1


def test_statistics_that_were_copied_can_be_put_back() -> None:
    model = Two(0.1)
    model(_microbatches(1)[0])
    before = [buffer.clone() for buffer in model.buffers()]
    statistics = BatchNormStatistics(model)
    copies = statistics.copied()
    model(_microbatches(2)[1])
    assert not torch.equal(model.first.running_mean, before[0])
    statistics.put_back(copies)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))


def test_synchronised_statistics_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"^1 is a SyncBatchNorm"):
        BatchNormStatistics(nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_rows_in_bfloat16_are_folded_as_their_kernels_do(momentum: float | None, layout: torch.memory_format) -> None:
    """Under autocast a layer of float32 statistics reads bfloat16, and its kernel rounds where the other one fuses."""
    generator = torch.Generator().manual_seed(5)
    images = [(torch.randn(4, 6, 5, 5, generator=generator) * 3 + 1).bfloat16() for _ in range(40)]
    model = nn.Sequential(nn.BatchNorm2d(6, momentum=momentum))
    native, statistics = copy.deepcopy(model), BatchNormStatistics(model)
    for start in range(0, 40, 4):
        step = [image.to(memory_format=layout) for image in images[start : start + 4]]
        for image in step:
            native(image)
        statistics.fold(statistics.taught(_read(model, statistics, step), Ranks(), lambda index, layer: True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), native.buffers(), strict=True))
    assert statistics.rounded == ()
    assert not model[0]._forward_pre_hooks, "looked at in the first step only"


def test_statistics_of_another_type_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).bfloat16(), nn.BatchNorm1d(2).double())
    assert BatchNormStatistics(model).rounded == ("1", "2")


class Uncounted(nn.BatchNorm1d):
    """Normalises by itself, in two halves, and counts nothing (as MoCo's split norm does)."""

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        mean, variance = rows.mean(0), rows.var(0)
        with torch.no_grad():
            self.running_mean.mul_(1 - self.momentum).add_(mean, alpha=self.momentum)
            self.running_var = self.running_var * (1 - self.momentum) + variance * self.momentum
        return (rows - mean) / (variance + self.eps).sqrt()


def test_a_subclass_that_counts_nothing_is_folded_too() -> None:
    layer, data = nn.Sequential(Uncounted(3)), _microbatches(8)
    native = copy.deepcopy(layer)
    for one in data:
        native(one)
    statistics = BatchNormStatistics(layer)
    statistics.fold(statistics.taught(_read(layer, statistics, data), Ranks(), lambda index, layer: True))
    for name, value in native.named_buffers():
        torch.testing.assert_close(value, dict(layer.named_buffers())[name])
    assert int(layer[0].num_batches_tracked) == 0


class Renormalised(nn.BatchNorm1d):
    """Reads its running mean in training, from the start or once it has run a while (Ioffe's renormalisation)."""

    after = 0

    def forward(self, rows: Tensor) -> Tensor:
        before = self.running_mean.clone() if int(self.num_batches_tracked) >= self.after else rows.mean(0)
        return super().forward(rows) + 0.1 * (rows.mean(0) - before).detach()


class Later(Renormalised):
    after = 1000


class Skipping(nn.BatchNorm1d):
    """Moves its statistics by another rule than an average over time."""

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.copy_(torch.maximum(self.running_mean, rows.mean(0)))
        return (rows - rows.mean(0)) * self.weight


class Scaled(nn.BatchNorm1d):
    """A plain BatchNorm, and something after it (as a fused activation)."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).relu()


class Noisy(nn.BatchNorm1d):
    """A plain BatchNorm, and something after it that draws, from whatever there is to draw from."""

    def forward(self, rows: Tensor) -> Tensor:
        factor = random.random() + np.random.rand()  # noqa: NPY002
        return nn.functional.dropout(super().forward(rows) * factor, training=self.training)


class Inline(nn.BatchNorm2d):
    """The native kernel, called by itself."""

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            rows, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )


def test_a_subclass_whose_statistics_cannot_be_folded_is_left_alone() -> None:
    model = nn.Sequential(
        Renormalised(3), Later(3), Skipping(3), Scaled(3), Inline(3), nn.BatchNorm3d(3), Uncounted(64), Noisy(3)
    )
    before, state = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()
    others = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    statistics = BatchNormStatistics(model)
    assert statistics.unlike == ["0", "1", "2"]
    assert list(statistics.layers) == ["3", "4", "5", "6", "7"]
    assert statistics.rounded == ("6",)
    assert all(torch.equal(one, two) for one, two in zip(model.buffers(), before, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert others == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


class Moving(nn.BatchNorm1d):
    """Normalises by itself as BatchNorm does, and moves each statistic as a rule of its own says."""

    def __init__(self, mean: str, variance: str) -> None:
        super().__init__(3, affine=False)
        self.rules = mean, variance

    def forward(self, rows: Tensor) -> Tensor:
        mean, variance = rows.mean(0), rows.var(0)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            for rule, kept, new in zip(
                self.rules, (self.running_mean, self.running_var), (mean, variance), strict=True
            ):
                if rule == "largest":
                    kept.copy_(torch.maximum(kept, new))
                elif rule != "none":
                    momentum = self.momentum ** {"near": 1.01, "far": 2.0}.get(rule, 1.0)
                    kept.copy_(kept * (1 - momentum) + new * momentum * (1.5 if rule == "scaled" else 1.0))
        return (rows - mean) / (rows.var(0, correction=0) + self.eps).sqrt()


@pytest.mark.parametrize(
    ("mean", "variance", "is_folded"),
    [
        ("average", "average", True),
        ("average", "near", True),
        ("near", "average", True),
        ("average", "scaled", True),
        ("scaled", "average", True),
        ("average", "far", False),
        ("average", "largest", False),
        ("average", "none", False),
        ("far", "average", False),
        ("largest", "average", False),
        ("none", "average", False),
        ("none", "none", False),
    ],
)
def test_a_subclass_is_folded_where_both_its_statistics_move_as_batch_norm_moves_them(
    mean: str, variance: str, is_folded: bool
) -> None:
    statistics = BatchNormStatistics(nn.Sequential(Moving(mean, variance)))
    assert (list(statistics.layers), statistics.unlike) == ((["0"], []) if is_folded else ([], ["0"]))
    assert statistics.row_coupled == ("0",)


def test_statistics_that_are_folded_nearly_are_said_to_be_rounded() -> None:
    statistics = BatchNormStatistics(nn.Sequential(nn.BatchNorm1d(3), Scaled(3), Moving("average", "near")))
    assert list(statistics.layers) == ["0", "1", "2"]
    assert statistics.rounded == ("2",)
