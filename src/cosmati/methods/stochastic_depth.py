"""Stochastic depth: residual blocks are skipped at random in training (Huang et al., 2016, arXiv 1603.09382)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch
from cosmati.core.clock import Time
from cosmati.core.method import Method, Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.surgery import Graft, graft

__all__ = ["StochasticBlock", "StochasticDepth", "apply_stochastic_depth"]

StochasticMethod = Literal["block", "sample"]
DropDistribution = Literal["linear", "uniform"]

_ALIASES = {"ResNetBottleneck": "Bottleneck"}
"""What Composer calls torchvision's class."""


_not_compiled = cast("Callable[[Callable[..., Any]], Callable[..., Any]]", torch.compiler.disable)
"""Chances are drawn on the host, and how far they are warmed up mustn't be compiled in."""


class StochasticBlock(Graft):
    """A residual block that may be skipped in training.

    What's skipped is all that the block adds to its input. A block whose output has another shape than its
    input is never skipped: it has nothing to fall back on.
    """

    prefix = "Stochastic"
    forward_caches = ("_keeps_shape", "drop_scale")
    drop_rate: float
    """Probability of being skipped."""

    drop_scale: float = 1.0
    """Factor on the probability in training, while it's warmed up."""

    stochastic_method: StochasticMethod
    _keeps_shape: bool | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the block's own)
        """Return the block's output, or its input where it's skipped."""
        input: Tensor = args[0] if args else next(iter(kwargs.values()))
        if self.training and isinstance(input, torch.fx.Proxy):
            msg = (
                "torch.fx would write one draw of this block down for good. Trace the model in evaluation mode "
                "(model.eval()), where nothing is drawn."
            )
            raise BatchError(msg)
        share = _not_compiled(self._share)(input, args, kwargs)
        if share is None:
            return input
        output = super().forward(*args, **kwargs)
        if isinstance(share, float):
            return _keep_share(input, output, share)
        return _interpolate(input, output, share) if isinstance(share, Tensor) else output

    def _share(self, input: Tensor, args: Any, kwargs: Any) -> Tensor | float | None:  # noqa: ANN401
        """Return how much of the block counts, one number or [rows]; True for all of it, None where it's skipped."""
        rate = self.drop_rate * self.drop_scale if self.training else self.drop_rate
        if rate == 0 or (not self.training and self.stochastic_method == "sample"):
            return True
        if not self.training:
            # torch.fx gives a proxy, which has no type yet.
            is_traced = isinstance(input, torch.fx.Proxy)
            return 1 - rate if is_traced else torch.tensor(1 - rate, dtype=input.dtype, device=input.device)
        if self.stochastic_method == "sample":
            return (torch.rand(len(input), device=input.device) >= rate) / (1 - rate)
        # Drawn on CPU whatever the device: the host has to know, and doesn't wait.
        return None if float(torch.rand(())) < rate and self._can_be_skipped(input, args, kwargs) else True

    def _can_be_skipped(self, input: Tensor, args: Any, kwargs: Any) -> bool:  # noqa: ANN401
        """Look once what the block returns, without a trace in buffers and generators."""
        if self._keeps_shape is None:
            training = {module: module.training for module in self.modules()}
            self.eval()
            try:
                with torch.no_grad():
                    output = super().forward(*args, **kwargs)
            finally:
                for module, flag in training.items():
                    module.training = flag
            if not isinstance(output, Tensor):
                msg = (
                    f"A block that returns a {type(output).__name__} can't be skipped as a whole. Use "
                    "stochastic_method='sample', or name the block inside that returns a tensor."
                )
                raise BatchError(msg)
            self._keeps_shape = output.shape == input.shape
        return self._keeps_shape

    def extra_repr(self) -> str:
        """Show the probability."""
        return ", ".join(filter(None, [super().extra_repr(), f"drop_rate={self.drop_rate:.4g}"]))


def apply_stochastic_depth(
    model: nn.Module,
    target_layer_name: str | type[nn.Module],
    stochastic_method: StochasticMethod = "block",
    drop_rate: float = 0.2,
    drop_distribution: DropDistribution = "linear",
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,  # noqa: ARG001
) -> nn.Module:
    """Let every residual block of a class be skipped at random in training, in place.

    With "block", a block is skipped for a whole microbatch, and isn't computed: training passes what's kept as it
    is, and evaluation takes the mean of both, `input + (1 - rate) * (output - input)`, as the paper does. With
    "sample", it's skipped for some rows: `input + kept / (1 - rate) * (output - input)`, and evaluation is the
    block as it was. For blocks that end in an addition this is the paper's formula; where an activation follows the
    addition, it's the mean of the outputs instead of the output of the mean.

    Draws come from PyTorch's default generators, as those of dropout do; a trainer seeds them by position. Blocks
    stay the same objects with the same parameters, hooks and names.

    Args:
        model: the model.
        target_layer_name: the blocks' class, or its name; subclasses are meant too. Blocks take a tensor first, and
            return one, or with "sample" a tuple that begins with one.
        stochastic_method: "block" or "sample".
        drop_rate: probability of skipping the block nearest the output, in [0, 1).
        drop_distribution: "linear" grows from `drop_rate / num_blocks` at the first block to `drop_rate` at the
            last, "uniform" is the same everywhere.
        optimizers: needs no change; taken so that calls of the functional interface fit.

    Returns:
        The same model.

    Raises:
        PlanError: an unknown option, or a rate out of range.

    Warns:
        UserWarning: there's no such block.
    """
    _check(stochastic_method, drop_rate, drop_distribution)
    if drop_rate == 0:
        return model
    blocks = [module for module in model.modules() if _is_of(module, target_layer_name)]
    for index, block in enumerate(blocks):
        if isinstance(block, StochasticBlock):
            continue
        share = (index + 1) / len(blocks) if drop_distribution == "linear" else 1.0
        graft(block, StochasticBlock)
        block.__dict__ |= {"drop_rate": drop_rate * share, "stochastic_method": stochastic_method}
    if not blocks:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        msg = (
            f"StochasticDepth changes nothing: {type(model).__name__} has no {target_layer_name}. Name the class of "
            f"its residual blocks; it has {', '.join(kinds)}."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    return model


@dataclass(frozen=True, kw_only=True)
class StochasticDepth(Method):
    """Skip residual blocks at random in training.

    Args:
        target_layer_name: class of the residual blocks, or its name.
        stochastic_method: skip a block for the whole microbatch, or for some rows ("sample").
        drop_rate: probability of skipping the last block, in [0, 1); 0 is off.
        drop_distribution: "linear" or "uniform" along the depth.
        drop_warmup: time string, or fraction of the run, in which the probability grows from 0. Evaluation with
            "block" takes the whole probability from the start.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    target_layer_name: str | type[nn.Module]
    stochastic_method: StochasticMethod = "block"
    drop_rate: float = 0.2
    drop_distribution: DropDistribution = "linear"
    drop_warmup: str | float = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        _check(self.stochastic_method, self.drop_rate, self.drop_distribution)
        Time.parse(self._warmup)

    @property
    def _warmup(self) -> str:
        return self.drop_warmup if isinstance(self.drop_warmup, str) else f"{self.drop_warmup}dur"

    @property
    def follows_elapsed(self) -> bool:
        """Whether the probability grows."""
        return self.drop_rate > 0 and Time.parse(self._warmup).value > 0

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its blocks made stochastic."""
        return apply_stochastic_depth(
            model, self.target_layer_name, self.stochastic_method, self.drop_rate, self.drop_distribution, optimizers
        )

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch itself; set how far the probabilities are warmed up."""
        warmup = at.budget.fraction_of(self._warmup)
        if warmup > 0 and self.drop_rate > 0:
            scale = min(1.0, at.elapsed / warmup)
            for module in at.model.modules():
                if isinstance(module, StochasticBlock):
                    module.drop_scale = scale
        return batch


def _check(stochastic_method: str, drop_rate: float, drop_distribution: str) -> None:
    for name, value, allowed in (
        ("stochastic_method", stochastic_method, get_args(StochasticMethod)),
        ("drop_distribution", drop_distribution, get_args(DropDistribution)),
    ):
        if value not in allowed:
            msg = f"StochasticDepth knows no {name}={value!r}. Use one of {allowed}."
            raise PlanError(msg)
    if not 0 <= drop_rate < 1:
        msg = (
            f"drop_rate={drop_rate} is no probability of skipping. Give a number from 0 (off) to below 1: a block "
            "that's always skipped never learns."
        )
        raise PlanError(msg)


def _is_of(module: nn.Module, target: str | type[nn.Module]) -> bool:
    if not isinstance(target, str):
        return isinstance(module, target)
    return any(kind.__name__ == _ALIASES.get(target, target) for kind in type(module).__mro__)


@torch.fx.wrap
def _keep_share(input: Tensor, output: Any, share: float) -> Any:  # noqa: ANN401  (the block's own)
    """Interpolate by a number. torch.fx writes the call down as it is: only a run knows the shapes."""
    return _interpolate(input, output, torch.tensor(share, dtype=input.dtype, device=input.device))


def _interpolate(input: Tensor, output: Any, weight: Tensor) -> Any:  # noqa: ANN401  (the block's own)
    """Return `input + weight * (output - input)`, weights being one or [rows]; another shape stays as it is."""
    if isinstance(output, tuple):
        return (_interpolate(input, output[0], weight), *output[1:])
    if output.shape != input.shape:
        return output
    dtype = torch.promote_types(input.dtype, output.dtype)
    weights = weight.to(dtype).view(-1, *[1] * (output.ndim - 1))
    return torch.lerp(input.to(dtype), output.to(dtype), weights)
