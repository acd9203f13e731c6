"""Gyro dropout: a fixed set of subnetworks, a few of which take turns (Lee et al., MLSys 2022, "Gyro Dropout")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch
from cosmati.core.method import Method, Position, Stage
from cosmati.core.rng import position_generator
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.surgery import Optimizers, warn_unchanged

__all__ = ["GyroDropout", "GyroDropoutLayer", "apply_gyro_dropout"]

_STREAM = "gyro_dropout"


class GyroDropoutLayer(nn.Dropout):
    """Dropout whose masks are those of `sigma` subnetworks, chosen once; `tau` of them are in use at a time.

    The rows of a batch take the subnetworks in use in turn. A mask is over features: the channels of images [rows,
    channels, height, width], the last dimension of anything else. It follows from seed, name and subnetwork alone, so
    there's no state. Evaluation is the identity, and what's kept in training is divided by 1 - p.

    Args:
        p: probability of dropping a feature, in [0, 1).
        sigma: number of subnetworks.
        tau: how many of them are in use at a time.
        interval: steps for which these stay in use.
        seed: of masks and choices.
        name: of the layer; layers of other names have other masks.
    """

    forward_caches: tuple[str, ...] = ("_masks",)

    _masks: dict[tuple[int, int], Tensor]

    def __init__(
        self, p: float = 0.5, sigma: int = 256, tau: int = 16, interval: int = 1, seed: int = 0, name: str = ""
    ) -> None:
        super().__init__(p)
        self.turn_into(p, sigma, tau, interval, seed, name)

    def turn_into(self, p: float, sigma: int, tau: int, interval: int, seed: int, name: str) -> None:
        """Set the options, of a plain dropout layer that has become one of these too."""
        _check(p, sigma, tau)
        self.p, self.sigma, self.tau = p, sigma, tau
        self.interval, self.seed, self.name = interval, seed, name
        self.step = 0
        self.counts = True
        self.offset = 0
        self._masks = {}

    def forward(self, input: Tensor) -> Tensor:
        """Return the input [rows, ...] with features dropped, in training."""
        if not self.training or self.p == 0:
            return input
        if isinstance(input, torch.fx.Proxy):
            msg = (
                "torch.fx would write the subnetworks of one step down for good. Trace the model in evaluation mode "
                "(model.eval()), where nothing is dropped."
            )
            raise BatchError(msg)
        mask: Tensor = _not_compiled(self._mask)(input)
        return input * mask

    def _mask(self, input: Tensor) -> Tensor:
        dim = 1 if input.ndim == 4 else input.ndim - 1
        masks = self._in_use(input.shape[dim]).to(input.device, input.dtype, non_blocking=True)
        order = (torch.arange(input.shape[0]) + self.offset) % self.tau
        if self.counts:
            self.step += 1
        shape = [input.shape[0], *[1] * (input.ndim - 1)]
        shape[dim] = input.shape[dim]
        return masks[order.to(input.device, non_blocking=True)].view(shape)

    def _in_use(self, num_features: int) -> Tensor:
        """Return the scaled masks of the subnetworks in use: float32 [tau, num_features], on CPU."""
        phase = self.step // self.interval
        if (phase, num_features) not in self._masks:
            chosen = torch.randint(self.sigma, (self.tau,), generator=position_generator(self.seed, _STREAM, phase))
            rows = [self._subnetwork(int(index), num_features) for index in chosen]
            self._masks = {(phase, num_features): torch.stack(rows) / (1 - self.p)}
        return self._masks[phase, num_features]

    def _subnetwork(self, index: int, num_features: int) -> Tensor:
        generator = position_generator(self.seed, f"{_STREAM}/{self.name}", index)
        return (torch.rand(num_features, generator=generator) >= self.p).float()

    def extra_repr(self) -> str:
        """Show the options."""
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}"


def apply_gyro_dropout(
    model: nn.Module,
    iters_per_epoch: int,
    max_epoch: int,
    p: float = 0.5,
    sigma: int = 256,
    tau: int = 16,
    optimizers: Optimizers = None,  # noqa: ARG001
    *,
    seed: int = 0,
) -> nn.Module:
    """Let every `nn.Dropout` drop by subnetworks, in place.

    Layers stay the same objects with the same hooks and names; their own probability is replaced. Without a trainer a
    layer counts its forward passes in training, to know which subnetworks are in use. Other kinds of dropout are left
    alone.

    Args:
        model: the model; the root itself may be a dropout layer.
        iters_per_epoch: steps of an epoch.
        max_epoch: epochs of the run; all subnetworks have been in use once on average when it ends.
        p: probability of dropping a feature, in [0, 1); 0 changes nothing.
        sigma: number of subnetworks.
        tau: how many of them are in use at a time.
        optimizers: needs no change; taken so that calls of the functional interface fit.
        seed: of masks and choices.

    Returns:
        The same model.

    Raises:
        PlanError: an option out of range.

    Warns:
        UserWarning: the model has no dropout.
    """
    _check(p, sigma, tau)
    if p == 0:
        return model
    found = False
    for name, layer in model.named_modules():
        if type(layer) is nn.Dropout or isinstance(layer, GyroDropoutLayer):
            found = True
            layer.__class__ = GyroDropoutLayer
            assert isinstance(layer, GyroDropoutLayer), "it has just become one"
            layer.turn_into(p, sigma, tau, max(1, iters_per_epoch * max_epoch * tau // sigma), seed, name)
    if not found:
        msg = f"GyroDropout changes nothing: {type(model).__name__} has no Dropout. Leave it out."
        warn_unchanged(msg, model, nn.Dropout)
    return model


@dataclass(frozen=True, kw_only=True)
class GyroDropout(Method):
    """Drop by subnetworks that take turns over the run, in the place of every dropout layer.

    The run's length in steps has to be known. Which subnetwork a row is given follows from its place in the step.

    Args:
        p: probability of dropping a feature, in [0, 1); 0 is off, and keeps the model's own dropout.
        sigma: number of subnetworks.
        tau: how many of them are in use at a time.
        seed: of masks and choices.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    p: float = 0.5
    sigma: int = 256
    tau: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        _check(self.p, self.sigma, self.tau)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its dropout layers replaced."""
        return apply_gyro_dropout(model, 1, 1, self.p, self.sigma, self.tau, optimizers, seed=self.seed)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch itself; tell the layers where in the run they are."""
        if self.p == 0:
            return batch
        num_steps = at.budget.num_steps
        if num_steps is None:
            msg = (
                f"GyroDropout shares {self.sigma} subnetworks out over the run, and {str(at.budget.span)!r} has no "
                "known number of steps. Use ba, sp, tok or ep."
            )
            raise PlanError(msg)
        for layer in at.model.modules():
            if isinstance(layer, GyroDropoutLayer):
                layer.counts = False
                # What follows from the position isn't state any more.
                layer.forward_caches = (*GyroDropoutLayer.forward_caches, "counts", "interval", "step", "offset")
                layer.interval = max(1, num_steps * self.tau // self.sigma)
                layer.step = at.clock.step
                layer.offset = at.microbatch * batch.num_rows
        return batch


_not_compiled = cast("Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]", torch.compiler.disable)
"""Masks are made on the host, and how far the run is mustn't be compiled in."""


def _check(p: float, sigma: int, tau: int) -> None:
    if not 0 <= p < 1 or not 1 <= tau <= sigma:
        msg = (
            f"GyroDropout can't use p={p}, sigma={sigma}, tau={tau}. Give a probability from 0 to below 1, and "
            "1 <= tau <= sigma subnetworks."
        )
        raise PlanError(msg)
