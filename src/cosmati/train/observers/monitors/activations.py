"""What layers put out."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cosmati.core.clock import Clock
from cosmati.train.compiled_blocks import is_compiled
from cosmati.train.observers.monitors.monitor import Measured, Monitor
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.outcome import StepOutcome

_ELEMENTS = 1024
_LOG = logging.getLogger("cosmati")


class ActivationStatistics(Monitor):
    """Root mean square, largest magnitude and share of zeros of what layers put out, in the step's last microbatch.

    Publishes `activation/LAYER/rms`, `/max` and `/zeros`. A hook stands in PyTorch's own table, not in the model's, and
    only in steps that are measured. Of a large output, 1024 numbers are looked at, taken evenly from its first rows.
    Compiled models aren't looked into: a hook would have them compiled anew.

    Args:
        layers: patterns of names of modules without children.
        max_layers: of more, so many are taken, evenly.
        every: the first measurement and each so many after it: a look costs as much as all other monitors together.

    Raises:
        ValueError: a number that can't be.
    """

    def __init__(self, layers: tuple[str, ...] = ("*",), *, max_layers: int = 8, every: int = 5) -> None:
        if max_layers < 1 or every < 1:
            msg = f"ActivationStatistics(max_layers={max_layers}, every={every}): both are at least 1."
            raise ValueError(msg)
        self._patterns, self._max, self._every = layers, max_layers, every
        self._names: dict[int, str] = {}
        self._found: dict[str, Tensor] = {}
        self._handle: RemovableHandle | None = None

    def open(self, run: WatchedRun) -> None:
        """Choose the layers."""
        named = list(run.model.named_modules())
        if any(is_compiled(m) or type(m).__name__ == "OptimizedModule" for _, m in named):
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

    def before(self, clock: Clock, number: int) -> None:
        """Put the hook in place."""
        if self._names and self._handle is None and (number - 1) % self._every == 0:
            self._handle = nn.modules.module.register_module_forward_hook(self._see)

    def _see(self, module: nn.Module, given: Any, output: Any) -> None:  # noqa: ANN401  (whatever a layer takes)
        name = self._names.get(id(module))
        if name is None or not isinstance(output, Tensor) or not _is_plain(output):
            return
        rows = output.detach()
        if rows.dim() > 1:
            rows = rows[: max(1, _ELEMENTS * len(rows) // rows.numel())]
        seen = rows.reshape(-1)
        seen = seen[:: max(1, len(seen) // _ELEMENTS)][:_ELEMENTS]
        self._found[name] = seen.clone()  # An in-place layer may change it before the step ends.

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return root mean squares, largest magnitudes and shares of zeros of what was seen, layer by layer."""
        by_size: dict[tuple[object, ...], list[str]] = {}
        for name, seen in self._found.items():
            by_size.setdefault((len(seen), seen.dtype, seen.device), []).append(name)
        found: dict[str, Tensor] = {}
        for names in by_size.values():
            # All layers at once: a call for each would take five times as long.
            values = torch.stack([self._found[name] for name in names]).float()
            rms = torch.linalg.vector_norm(values, dim=1) / math.sqrt(values.shape[1])
            zeros = 1 - torch.count_nonzero(values, dim=1) / values.shape[1]
            found[json.dumps(names)] = torch.cat([rms, values.abs().amax(1), zeros])
        return found

    def judge(self, found: Mapping[str, float | list[float]], outcome: StepOutcome) -> Mapping[str, float]:
        """Return the statistics by name."""
        values: dict[str, float] = {}
        for told, numbers in found.items():
            names = json.loads(told)
            assert isinstance(numbers, list), "of one dimension"
            for index, what in enumerate(("rms", "max", "zeros")):
                own = numbers[index * len(names) : (index + 1) * len(names)]
                values |= {f"activation/{name}/{what}": number for name, number in zip(names, own, strict=True)}
        return values

    def end(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._found = None, {}


def _is_plain(output: Tensor) -> bool:
    """Say whether there are floats to look at: a sparse or nested one has no rows, one of `torch.func` no memory."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(output)  # noqa: SLF001
    is_dense = output.layout is torch.strided and not output.is_nested and not is_wrapped
    return is_dense and output.is_floating_point() and output.numel() > 0
