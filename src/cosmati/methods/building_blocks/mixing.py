"""What methods that mix rows have in common: shares, pairs and targets as probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cosmati.errors import BatchError


def sample_dirichlet(concentration: float, num: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw `num` shares that sum to 1 of the symmetric Dirichlet distribution; of two, each is Beta distributed.

    Gamma variates are drawn by rejection (Marsaglia and Tsang, 2000, "A simple method for generating gamma
    variables") and kept as logarithms, so that small concentrations neither underflow nor divide by zero.

    Args:
        concentration: parameter of each share, > 0.
        num: shares, >= 1.
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        float64 [num], on CPU.
    """
    # Below this all weight is on one share anyway, and the logarithms would leave what a float can hold.
    shape = max(concentration, 1e-300)
    draws = [_log_gamma_variate(shape, generator) for _ in range(num)]
    return torch.tensor(draws, dtype=torch.float64).softmax(0)


NUM_GAMMA_DRAWS = 33
"""Uniforms that a gamma variate takes: 16 tries, of which each succeeds with a probability over 0.95, and a boost."""


def log_gamma_of_uniforms(concentration: float, uniforms: Tensor) -> Tensor:
    """Return logarithms of gamma variates that follow from given uniforms, whatever becomes of others.

    The same method as `sample_dirichlet`'s, with a fixed number of tries; normals are Box and Muller's.

    Args:
        concentration: shape of the distribution, > 0.
        uniforms: in [0, 1), float64 [..., 33].

    Returns:
        float64 [...].
    """
    boost, tries = uniforms[..., 0], 1 - uniforms[..., 1:].unflatten(-1, (-1, 2))
    is_small = concentration < 1
    offset = concentration + is_small - 1 / 3
    radius, angle = (-2 * tries[..., 0].log()).sqrt(), 2 * torch.pi * tries[..., 1]
    normals = radius * angle.cos()
    cubes = (1 + normals / math.sqrt(9 * offset)) ** 3
    log_cubes = cubes.clamp(min=1e-300).log()
    # The try's second normal is independent of the first, and so is the uniform that it's made into.
    log_uniforms = torch.special.ndtr(radius * angle.sin()).log()
    accepts = (cubes > 0) & (log_uniforms < 0.5 * normals**2 + offset * (1 - cubes + log_cubes))
    first = accepts.double().argmax(-1, keepdim=True)
    logs: Tensor = math.log(offset) + log_cubes.gather(-1, first)[..., 0]
    return logs + torch.log1p(-boost) / max(concentration, 1e-300) if is_small else logs


def pair_rows(num_rows: int, present: Tensor | None, generator: torch.Generator | None = None) -> Tensor:
    """Draw a partner for each row, int64 [rows] on CPU; next to a tombstone, each row is its own.

    Nobody is mixed with an empty row, and a deleted row changes no pairs but its own.

    Args:
        num_rows: rows, tombstones included.
        present: bool [rows], False at tombstones; None where there are none (`Batch.present`).
        generator: of the CPU; None is PyTorch's default generator.
    """
    pairs = torch.randperm(num_rows, generator=generator)
    if present is None:
        return pairs
    return pairs.where(present & present[pairs], torch.arange(num_rows))


def one_hot(target: Tensor, num_classes: int, ignore_index: int = -100) -> Tensor:
    """Return class indices [rows, ...] as probabilities float32 [rows, classes, ...]; zero where ignored.

    Integers that are one-hot already keep their shape.

    Raises:
        BatchError: an index isn't one of a class, where the targets are on CPU.
    """
    if is_one_hot(target, num_classes):
        return target.float()
    learnt = known_classes(target, num_classes, ignore_index).unsqueeze(1)
    target = target.long().unsqueeze(1)
    soft = torch.zeros(target.shape[0], num_classes, *target.shape[2:], device=target.device)
    return soft.scatter_(1, target.where(learnt, 0), learnt.float())


def is_one_hot(target: Tensor, num_classes: int) -> bool:
    """Say whether integers are one-hot [rows, classes, ...]: 1 at the class and else 0, or all 0 where there's none.

    Class indices [rows, length] have that shape too where the length is the number of classes. So the values decide,
    and an accelerator is waited for where the shape fits.
    """
    if target.ndim < 2 or target.shape[1] != num_classes:
        return False
    is_bit = ((target == 0) | (target == 1)).all()
    return bool(is_bit & (target.sum(1) <= 1).all())


def known_classes(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """Return which of the class indices aren't ignored, bool, shape of the target.

    Raises:
        BatchError: an index isn't one of a class. Not looked at on an accelerator, which would have to be waited for.
    """
    target = target.long()  # A byte can't be compared with 256.
    learnt = target != ignore_index
    if target.device.type == "cpu" and bool((learnt & ((target < 0) | (target >= num_classes))).any()):
        low, high = int(target[learnt].min()), int(target[learnt].max())
        msg = (
            f"Targets from {low} to {high} in this batch, and the loss has {num_classes} classes: 0 to "
            f"{num_classes - 1}. Give the loss the right num_classes, or mend the labels."
        )
        raise BatchError(msg)
    return learnt


def _log_gamma_variate(shape: float, generator: torch.Generator | None) -> float:
    boost = 0.0
    if shape < 1:
        uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
        boost = math.log1p(-uniform) / shape
        shape += 1
    offset = shape - 1 / 3
    while True:
        normal = float(torch.randn((), dtype=torch.float64, generator=generator))
        uniform = 1 - float(torch.rand((), dtype=torch.float64, generator=generator))
        base = 1 + normal / math.sqrt(9 * offset)
        if base <= 0:
            continue
        log_cube = 3 * math.log(base)
        if math.log(uniform) < 0.5 * normal**2 + offset * (1 - math.exp(log_cube) + log_cube):
            return math.log(offset) + log_cube + boost
