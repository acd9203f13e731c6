"""What layers put out."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cosmati.core.clock import Clock
from cosmati.train.observers.monitors.monitor import Measured, Monitor
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.outcome import StepOutcome

_ELEMENTS = 1024
_LOG = logging.getLogger("cosmati")


class ActivationStatistics(Monitor):
    """Root mean square, largest magnitude and share of zeros of what layers put out, in the step's last microbatch.

    Publishes `activation/LAYER/rms`, `/max` and `/zeros`. A hook stands in PyTorch's own table, not in the model's, and
    only in steps that are measured. Of a large output, so many of the first rows are looked at as hold 1024 numbers.
    Compiled models aren't looked into: a hook would have them compiled anew.

    Args:
        layers: patterns of names of modules without children.
        max_layers: of more, so many are taken, evenly.
    """

    def __init__(self, layers: tuple[str, ...] = ("*",), *, max_layers: int = 8) -> None:
        self._patterns, self._max = layers, max_layers
        self._names: dict[int, str] = {}
        self._found: dict[str, Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._handle: RemovableHandle | None = None

    def open(self, run: WatchedRun) -> None:
        """Choose the layers."""
        named = list(run.model.named_modules())
        if any(m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for _, m in named):  # noqa: SLF001
            _LOG.warning("The model is compiled: its activations aren't measured.")
            return
        leaves = [
            (name, module)
            for name, module in named
            if next(module.children(), None) is None and any(fnmatchcase(name, one) for one in self._patterns)
        ]
        count = min(len(leaves), self._max)
        chosen = [leaves[index * len(leaves) // count] for index in range(count)]
        self._names = {id(module): name or "model" for name, module in chosen}

    def before(self, clock: Clock) -> None:
        """Put the hook in place."""
        if self._names and self._handle is None:
            self._handle = nn.modules.module.register_module_forward_hook(self._see)

    def _see(self, module: nn.Module, given: Any, output: Any) -> None:  # noqa: ANN401  (whatever a layer takes)
        name = self._names.get(id(module))
        if name is None or not isinstance(output, Tensor) or not output.is_floating_point() or not output.numel():
            return
        seen = output.detach()
        if seen.dim() > 1:
            seen = seen[: max(1, _ELEMENTS * len(seen) // seen.numel())]
        self._found[name] = seen.clone()  # An in-place layer may change it before the step ends.

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return norms, extremes and counts of what was seen."""
        seen = list(self._found.values())
        if not seen:
            return {}
        self._sizes = {name: one.numel() for name, one in self._found.items()}
        # On a CPU these take a third of the norms of order infinity and 0.
        low, high = zip(*map(torch.aminmax, seen), strict=True)
        count = [torch.count_nonzero(one) for one in seen]
        norm = torch._foreach_norm(seen, 2, torch.float32)  # noqa: SLF001
        return {"norm": torch.stack(norm), "low": torch.stack(low), "high": torch.stack(high), "n": torch.stack(count)}

    def judge(self, found: Mapping[str, float | list[float]], outcome: StepOutcome) -> Mapping[str, float]:
        """Return the statistics by layer."""
        columns = [column for column in found.values() if isinstance(column, list)]
        values: dict[str, float] = {}
        for (name, size), (norm, low, high, count) in zip(self._sizes.items(), zip(*columns, strict=True), strict=True):
            values[f"activation/{name}/rms"] = norm / math.sqrt(size)
            values[f"activation/{name}/max"] = max(-low, high)
            values[f"activation/{name}/zeros"] = 1 - count / size
        self._sizes = {}
        return values

    def end(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._found = None, {}
