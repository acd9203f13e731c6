"""BatchNorm's running statistics, folded in microbatch order at commit.

With several microbatches, possibly on several ranks, each forward pass writes its own statistics (a momentum of 1
does that exactly), and the commit folds all V in order with the native formula. A forward pass that isn't a
microbatch of the step (scoring rows, a second pass) then leaves no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cosmati.core.rng import DefaultGenerators
from cosmati.errors import PlanError
from cosmati.routing.regions import Regions
from cosmati.train.held import remember
from cosmati.train.ranks import Ranks


class LayerStatistic(NamedTuple):
    """What a microbatch teaches a layer: float32 [channels] each.

    Attributes:
        name: of the layer.
        mean: of the microbatch.
        variance: of the microbatch.
        is_counted: whether the layer counts it.
    """

    name: str
    mean: Tensor
    variance: Tensor
    is_counted: bool


class BatchNormStatistics:
    """The running statistics of a model's BatchNorm layers.

    A subclass with a forward pass of its own is tried out: where that reads running statistics in training, or moves
    them otherwise than BatchNorm, they can't be folded, and are watched like any other module's.

    Attributes:
        layers: whose statistics are folded, by name.
        unlike: names of the others.
        repeated: names of layers that ran more than once in a microbatch, of which the last time alone is folded.
        row_coupled: names of all these, and of modules that declare `couples = {"rows"}`.

    Raises:
        PlanError: a SyncBatchNorm, whose statistics depend on the number of ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, _BatchNorm] = {}
        self.unlike: list[str] = []
        self.repeated: set[str] = set()
        self._inexact: set[str] = set()
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
                is_exact = _is_exact(module)
                if is_exact is None:
                    self.unlike.append(name)
                else:
                    self.layers[name] = module
                    self._inexact |= set() if is_exact else {name}
        told = [(name or "the model", getattr(module, "couples", ())) for name, module in model.named_modules()]
        declared = [name for name, couples in told if isinstance(couples, Collection) and "rows" in couples]
        self.row_coupled = (*self.layers, *self.unlike, *declared)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Let forward passes write their own statistics in place of running ones, and put the running ones back."""
        kept = [
            (layer, layer.momentum, [_statistic(layer, name).clone() for name in STATISTICS])
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
                for name, value in zip(STATISTICS, values, strict=True):
                    _statistic(layer, name).copy_(value)

    def _see(self, name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Note what a layer reads: under autocast a narrower type than its statistics', for which kernels round."""
        self._reads_narrow[name] = bool(given) and given[0].dtype in (torch.bfloat16, torch.float16)

    @property
    def rounded(self) -> tuple[str, ...]:
        """Names of layers whose statistics aren't float32 of native kernels: folding them gives other bits."""
        return tuple(
            name
            for name, layer in self.layers.items()
            if name in self._inexact or _statistic(layer, STATISTICS[0]).dtype != torch.float32
        )

    @property
    def own(self) -> list[Tensor]:
        """The running means and variances as they are."""
        return [_statistic(layer, name) for layer in self.layers.values() for name in STATISTICS[:2]]

    def copied(self) -> list[Tensor]:
        """Return copies of the running statistics."""
        return [_statistic(layer, name).clone() for layer in self.layers.values() for name in STATISTICS]

    def put_back(self, copies: Sequence[Tensor]) -> None:
        """Undo what happened to the running statistics since `copied`."""
        own = [_statistic(layer, name) for layer in self.layers.values() for name in STATISTICS]
        for statistic, value in zip(own, copies, strict=True):
            statistic.copy_(value)

    def clear(self) -> dict[str, int]:
        """Put the running statistics back for a forward pass that reads them; return a mark for `read`.

        Frozen layers read them in each microbatch, and so does a pass in eval mode before the loss's own. A model may
        read the counter, and how many of a step's microbatches came before is another number on each rank.
        """
        for layer, _, values in self._kept:
            for name, value in zip(STATISTICS, values, strict=True):
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
            num_runs = _statistic(layer, "num_batches_tracked")._version - mark[name]  # noqa: SLF001
            self.repeated |= {name} if num_runs > 1 else set()
            # A subclass with a forward pass of its own may leave the counter alone.
            flag = _COUNTED if num_runs else 0.0 if torch.equal(mean, before[0]) else _UNCOUNTED
            values.append(torch.full((1,), flag, device=mean.device))
            own = [mean.float(), _statistic(layer, "running_var").float()]
            values += own if flag else [torch.zeros_like(value) for value in own]
        return torch.cat(values)

    def taught(self, rows: Sequence[Tensor], ranks: Ranks, teaches: Callable[[int, str], bool]) -> list[LayerStatistic]:
        """Return what a step's microbatches teach, on all ranks, in their order.

        Args:
            rows: what `read` returned for each of this rank's microbatches.
            ranks: the data-parallel ranks.
            teaches: whether microbatch m may teach the layer of that name.
        """
        found = []
        for index, row in enumerate(ranks.gather(torch.stack(list(rows)))):
            start = 0
            for name, layer in self.layers.items():
                size = layer.num_features
                flag, mean, variance, _ = row[start:].split([1, size, size, len(row) - start - 1 - 2 * size])
                start += 1 + 2 * size
                if teaches(index, name) and bool(flag):
                    found.append(LayerStatistic(name, mean, variance, float(flag) == _COUNTED))
        return found

    def fold(self, taught: Iterable[LayerStatistic]) -> None:
        """Fold into the running statistics what a step's microbatches teach."""
        for name, mean, variance, is_counted in taught:
            layer = self.layers[name]
            count = _statistic(layer, "num_batches_tracked")
            counted = count.clone()
            _fold(layer, mean, variance, is_narrow=self._reads_narrow.get(name, False))
            if not is_counted:
                count.copy_(counted)


def _is_exact(layer: _BatchNorm) -> bool | None:
    """Say whether folding gives the bits of a layer's own forward pass; None where it doesn't give its statistics."""
    if vars(layer).get("forward", type(layer).forward) is _BatchNorm.forward:
        return True
    put_back = remember({"": layer})
    try:
        where = _statistic(layer, STATISTICS[0]).device
        generators = DefaultGenerators(where)
        with generators.restored(), torch.no_grad():
            # Some begin as BatchNorm, and read what runs later.
            tried = [_trial(layer, generators, seed, count) for seed in range(4) for count in (0, 1_000_000)]
    except Exception:  # noqa: BLE001  (the user's own code, on rows of ours)
        return None
    finally:
        put_back()
    return None if None in tried else all(tried)


_MOMENTUM = 0.1


def _trial(layer: _BatchNorm, generators: DefaultGenerators, seed: int, count: int) -> bool | None:
    rows = _rows_for(layer, seed)
    results = []
    for mean, variance, momentum in ((0.7, 2.3, _MOMENTUM), (-3.0, 9.0, 1.0)):
        own = copy.deepcopy(layer).train()
        own.momentum = momentum
        for name, value in zip(STATISTICS, (mean, variance, count), strict=True):
            _statistic(own, name).fill_(value)
        generators.seed(seed)
        results.append((own, own.forward(rows)))
    (own, output), (alone, other) = results
    folded = copy.deepcopy(layer)
    folded.momentum = _MOMENTUM
    _statistic(folded, STATISTICS[0]).fill_(0.7)
    _statistic(folded, STATISTICS[1]).fill_(2.3)
    own_mean, own_variance = (_statistic(alone, name).float() for name in STATISTICS[:2])
    _fold(folded, own_mean, own_variance, is_narrow=rows.dtype in (torch.bfloat16, torch.float16))
    pairs = [(_statistic(own, name), _statistic(folded, name)) for name in STATISTICS[:2]]
    if not torch.equal(output, other) or not all(torch.allclose(one, two, rtol=1e-2) for one, two in pairs):
        return None
    return all(torch.equal(one, two) for one, two in pairs)


def _rows_for(layer: _BatchNorm, seed: int) -> Tensor:
    """Return rows of the first shape that a layer takes."""
    mean = _statistic(layer, STATISTICS[0])
    kind = layer.weight.dtype if layer.affine else mean.dtype
    for shape in ((), (4,), (4, 4), (2, 2, 2)):
        rows = torch.randn(8, layer.num_features, *shape, generator=torch.Generator().manual_seed(seed))
        with suppress(ValueError, RuntimeError):
            rows = rows.to(mean.device, kind)
            copy.deepcopy(layer).train().forward(rows)
            return rows
    msg = "it takes no rows of any shape"
    raise ValueError(msg)


def unrouted(statistics: BatchNormStatistics, regions: Regions) -> tuple[str, ...]:
    """Say which statistics lie in no one region, so that every class that is offered moves them.

    A layer without parameters of its own belongs to the one region of the nearest module around it that has any.
    """
    names = [name for name in statistics.layers if regions.region_of_buffer(f"{name}.running_mean".lstrip(".")) is None]
    return (f"the statistics of {', '.join(names)} lie in no one region",) if names else ()


_COUNTED, _UNCOUNTED = 1.0, 2.0
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
