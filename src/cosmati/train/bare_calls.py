"""Two calls of PyTorch without what surrounds them for others: a backward pass and an optimizer's step.

What they leave out takes 25 us each, of a step of 200 us: checks of what the trainer knows, and a scope for a profiler
that nobody has started. Where somebody listens, PyTorch's own calls are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import optimizer as torch_optimizer

from cosmati.optim.in_cache import in_cache

_BACKWARD = Tensor.backward
# PyTorch puts one such wrapper around the `step` of each class of optimizers.
_PROFILED = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__


def run_backward(objective: Tensor, inputs: Sequence[Tensor] = ()) -> None:
    """Differentiate a scalar, and add to the gradients of what it was computed of: as `objective.backward()` does.

    Args:
        objective: scalar.
        inputs: for these alone; empty for all.
    """
    is_usual = type(objective) is Tensor and objective.dim() == 0 and objective.is_floating_point()
    # Others' classes and modes may have a backward pass of their own, and so has who puts one into PyTorch.
    if not is_usual or torch._C._is_torch_function_mode_enabled() or Tensor.backward is not _BACKWARD:  # noqa: SLF001
        objective.backward(inputs=inputs or None)
        return
    # A new one each time: hooks of the user's are given it, and may write to it.
    ones = objective.new_ones(())
    _engine_run_backward(
        (objective,),
        (ones,),
        keep_graph=False,
        create_graph=False,
        inputs=tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return an optimizer's `step`: without its scope, unless there's a profiler, or a hook, or it's somebody's own."""
    method = type(optimizer).step
    if (
        getattr(method, "__code__", None) is not _PROFILED
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks  # noqa: SLF001
        or optimizer._optimizer_step_post_hooks  # noqa: SLF001
        or torch_optimizer._global_optimizer_pre_hooks  # noqa: SLF001
        or torch_optimizer._global_optimizer_post_hooks  # noqa: SLF001
        or torch._C._autograd._profiler_enabled()  # noqa: SLF001
    ):
        return optimizer.step
    return partial(_step_in_cache, method.__wrapped__, optimizer)  # type: ignore[attr-defined]


def _step_in_cache(step: Callable[[torch.optim.Optimizer], object], optimizer: torch.optim.Optimizer) -> None:
    with in_cache(optimizer):
        step(optimizer)
