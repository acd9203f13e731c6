"""Floating-point operations of attention's kernel for processors, which PyTorch's counter doesn't know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Shape = tuple[int, ...]


def _forward(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Two products: scores, and their sums of values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _backward(_gradient: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Five products: scores anew, and the gradients of scores, values, queries and keys."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def missing_formulas() -> dict[Any, Callable[..., int]]:
    """Return formulas by operator, for `FlopCounterMode(custom_mapping=...)`."""
    names: dict[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": _forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _backward,
    }
    return {getattr(torch.ops.aten, name): formula for name, formula in names.items() if hasattr(torch.ops.aten, name)}
