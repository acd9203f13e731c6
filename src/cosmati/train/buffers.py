"""BatchNorm's running statistics, folded in microbatch order at commit.

With several microbatches, possibly on several ranks, each forward pass writes its own statistics (a momentum of 1
does that exactly), and the commit folds all V in order with the native formula. A forward pass that isn't a
microbatch of the step (scoring rows, a second pass) then leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cosmati.errors import PlanError
from cosmati.routing.regions import Regions
from cosmati.train.ranks import Ranks


class BatchNormStatistics:
    """The running statistics of a model's BatchNorm layers.

    Raises:
        PlanError: a SyncBatchNorm, whose statistics depend on the number of ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, _BatchNorm] = {}
        self._kept: list[tuple[_BatchNorm, float | None, list[Tensor]]] = []
        self._reads_narrow: dict[str, bool] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                msg = (
                    f"{name} is a SyncBatchNorm: its statistics depend on the number of ranks. Use BatchNorm; each "
                    "microbatch has its own statistics, the same on any number of ranks."
                )
                raise PlanError(msg)
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                self.layers[name] = module

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Let forward passes write their own statistics in place of running ones, and put the running ones back."""
        kept = [
            (layer, layer.momentum, [_statistic(layer, name).clone() for name in _NAMES])
            for layer in self.layers.values()
        ]
        self._kept = kept
        for layer in self.layers.values():
            layer.momentum = 1.0
        unseen = [
            layer.register_forward_pre_hook(partial(self._see, name))
            for name, layer in self.layers.items()
            if name not in self._reads_narrow
        ]
        try:
            yield
        finally:
            for handle in unseen:
                handle.remove()
            for layer, momentum, values in kept:
                layer.momentum = momentum
                for name, value in zip(_NAMES, values, strict=True):
                    _statistic(layer, name).copy_(value)

    def _see(self, name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Note what a layer reads: under autocast a narrower type than its statistics', for which kernels round."""
        self._reads_narrow[name] = bool(given) and given[0].dtype in (torch.bfloat16, torch.float16)

    @property
    def rounded(self) -> tuple[str, ...]:
        """Names of layers whose statistics aren't float32: folding them doesn't give the native bits."""
        return tuple(name for name, layer in self.layers.items() if _statistic(layer, _NAMES[0]).dtype != torch.float32)

    def copied(self) -> list[Tensor]:
        """Return copies of the running statistics."""
        return [_statistic(layer, name).clone() for layer in self.layers.values() for name in _NAMES]

    def put_back(self, copies: Sequence[Tensor]) -> None:
        """Undo what happened to the running statistics since `copied`."""
        own = [_statistic(layer, name) for layer in self.layers.values() for name in _NAMES]
        for statistic, value in zip(own, copies, strict=True):
            statistic.copy_(value)

    def clear(self) -> dict[str, int]:
        """Put the running statistics back for a forward pass that reads them; return a mark for `read`.

        Frozen layers read them in each microbatch, and so does a pass in eval mode before the loss's own.
        """
        for layer, _, values in self._kept:
            for name, value in zip(_NAMES[:2], values, strict=False):
                _statistic(layer, name).copy_(value)
        # The native kernel writes statistics without marking them; the counter is marked.
        return {name: _statistic(layer, "num_batches_tracked")._version for name, layer in self.layers.items()}  # noqa: SLF001

    def read(self, mark: dict[str, int]) -> Tensor:
        """Return what the last forward pass wrote: for each layer a flag, means, variances; float32 [n].

        The flag is 0 where the layer wasn't run.
        """
        values: list[Tensor] = []
        for (name, layer), (_, _, before) in zip(self.layers.items(), self._kept, strict=True):
            mean = _statistic(layer, "running_mean")
            is_counted = _statistic(layer, "num_batches_tracked")._version != mark[name]  # noqa: SLF001
            # A subclass with a forward pass of its own may leave the counter alone.
            flag = _COUNTED if is_counted else 0.0 if torch.equal(mean, before[0]) else _UNCOUNTED
            values.append(torch.full((1,), flag, device=mean.device))
            own = [mean.float(), _statistic(layer, "running_var").float()]
            values += own if flag else [torch.zeros_like(value) for value in own]
        return torch.cat(values)

    def fold(self, rows: Sequence[Tensor], ranks: Ranks, teaches: Callable[[int, str], bool]) -> None:
        """Fold the statistics of a step's microbatches into the running ones.

        Args:
            rows: what `read` returned for each of this rank's microbatches.
            ranks: the data-parallel ranks.
            teaches: whether microbatch m may teach the layer of that name.
        """
        for index, row in enumerate(ranks.gather(torch.stack(list(rows)))):
            start = 0
            for name, layer in self.layers.items():
                size = layer.num_features
                flag, mean, variance = (
                    row[start],
                    row[start + 1 : start + 1 + size],
                    row[start + 1 + size : start + 1 + 2 * size],
                )
                start += 1 + 2 * size
                if teaches(index, name) and bool(flag):
                    count = _statistic(layer, "num_batches_tracked")
                    counted = count.clone()
                    _fold(layer, mean, variance, is_narrow=self._reads_narrow.get(name, False))
                    if float(flag) == _UNCOUNTED:
                        count.copy_(counted)


def unrouted(statistics: BatchNormStatistics, regions: Regions) -> tuple[str, ...]:
    """Say which statistics lie in no one region, so that every class that is offered moves them.

    A layer without parameters of its own belongs to the one region of the nearest module around it that has any.
    """
    names = [name for name in statistics.layers if regions.region_of_buffer(f"{name}.running_mean".lstrip(".")) is None]
    return (f"the statistics of {', '.join(names)} lie in no one region",) if names else ()


_COUNTED, _UNCOUNTED = 1.0, 2.0
_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def _statistic(layer: _BatchNorm, name: str) -> Tensor:
    value = getattr(layer, name)
    assert isinstance(value, Tensor), "only layers with running statistics are kept"
    return value


def _fold(layer: _BatchNorm, mean: Tensor, variance: Tensor, *, is_narrow: bool) -> None:
    count = _statistic(layer, "num_batches_tracked").add_(1)
    factor = np.float32(1.0 / float(count) if layer.momentum is None else layer.momentum)
    rest = float(np.float32(1) - factor)
    # The native CPU kernels' bits, found by trial over 400 updates: they round the product for the mean and fuse it for
    # the variance, in float32. Those that read bfloat16 round both (300 of 300; fused, 260). lerp_ gives other bits.
    _statistic(layer, "running_mean").mul_(rest).add_(mean * float(factor))
    running_var = _statistic(layer, "running_var").mul_(rest)
    if is_narrow:
        running_var.add_(variance * float(factor))
    else:
        running_var.add_(variance, alpha=float(factor))
