"""Sketches of directions: 16 numbers whose scalar products estimate those of whole gradients or updates."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

WIDTH = 16
_DOMAIN = b"cosmati direction sketch 1\0"
_CHUNK = 1 << 15
"""Groups of 16 that are worked on at once: what is held beside a gradient doesn't grow with it."""
_SIGNS = 1.0 - 2.0 * ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).float()
"""The eight signs of each byte."""


class DirectionSketch:
    """Projects tensors onto 16 random directions, those of a seed.

    Of a tensor of n values in row-major order, filled with zeros to m groups of 16, the sketch is

        (1 / 4) sum over groups j of  D2[j] * (H (D1[j] * x[j]))

    with H the Hadamard matrix of order 16 (Sylvester's) and D1, D2 of random signs, [m, 16] each. Every one of the 16
    rows of this projection has independent signs, so <sketch a, sketch b> is <a, b> on average, and the cosine of two
    sketches is off by about (1 - cosine^2) / 4 (D. Achlioptas, "Database-friendly random projections", J. Comput.
    Syst. Sci. 66, 2003; N. Ailon, B. Chazelle, STOC 2006, for the signs around a Hadamard matrix). It's linear: that
    of a region is the sum of its parameters'.

    Signs are the bits, lowest first and 1 for minus, of SHAKE-128 over `cosmati direction sketch 1`, a zero byte, the
    seed in decimal, a zero byte and the parameter's name in UTF-8: first D1, then D2. Sums are taken in float32, each
    addition by itself and in one order, so that bits follow from the values alone: not from threads, ranks or device.

    Args:
        seed: of the run, as entry 0 of its ledger has it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._signs: dict[tuple[str, torch.device], Tensor] = {}

    @torch.no_grad()
    def of(self, name: str, values: Tensor) -> Tensor:
        """Return the sketch of a parameter's gradient or update, float32 [16].

        Args:
            name: the parameter's; its signs follow from it. They're kept, a quarter of a byte for each value.
            values: dense, of the parameter's shape.
        """
        flat = (torch.view_as_real(values) if values.is_complex() else values).detach().reshape(-1)
        num_groups = -(-flat.numel() // WIDTH)
        if not num_groups:
            return torch.zeros(WIDTH, device=flat.device)
        signs = self._signs_of(name, num_groups, flat.device)
        found, bytes_to_signs = torch.zeros(WIDTH, device=flat.device), _SIGNS.to(flat.device)
        for first in range(0, num_groups, _CHUNK):
            end = min(first + _CHUNK, num_groups)
            own = flat[first * WIDTH : end * WIDTH].float()
            groups = torch.nn.functional.pad(own, (0, (end - first) * WIDTH - own.numel())).view(-1, WIDTH)
            inner, outer = (bytes_to_signs[half[first:end].int()].view(-1, WIDTH) for half in signs)
            found += _folded(_transformed(groups * inner).mul_(outer))
        return found / math.sqrt(WIDTH)

    def _signs_of(self, name: str, num_groups: int, device: torch.device) -> Tensor:
        """Return D1 and D2, a bit for a sign, uint8 [2, groups, 2]."""
        key = name, device
        known = self._signs.get(key)
        if known is None or known.shape[1] != num_groups:
            bits = hashlib.shake_128(_DOMAIN + str(self._seed).encode() + b"\0" + name.encode())
            drawn = np.frombuffer(bytearray(bits.digest(2 * num_groups * WIDTH // 8)), np.uint8)
            known = self._signs[key] = torch.from_numpy(drawn).view(2, num_groups, WIDTH // 8).to(device)
        return known


def _transformed(groups: Tensor) -> Tensor:
    """Return H times each group, by additions of pairs; what is given may be overwritten."""
    other = torch.empty_like(groups)
    width = 1
    while width < WIDTH:
        (left, right), (total, difference) = (
            one.view(-1, WIDTH // (2 * width), 2, width).unbind(2) for one in (groups, other)
        )
        torch.add(left, right, out=total)
        torch.sub(left, right, out=difference)
        groups, other = other, groups
        width *= 2
    return groups


def _folded(groups: Tensor) -> Tensor:
    """Return the sum of groups, in place: the second half is added to the first one until one is left."""
    while len(groups) > 1:
        half = -(-len(groups) // 2)
        groups[: len(groups) - half] += groups[half:]
        groups = groups[:half]
    return groups[0]
