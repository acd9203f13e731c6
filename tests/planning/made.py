"""Measured parts with round figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from cosmati.planning.measuring import MeasuredParts

_PARTS = MeasuredParts(
    num_microbatches=8,
    precision="float32",
    num_steps=3600,
    parameters=400,
    learning=400,
    num_elements=100,
    gradients=400,
    largest_block=100,
    outside_blocks=0,
    buffers=0,
    state_cut=800,
    state_whole=(),
    averages=0,
    again=0,
    rows=16,
    activations=1600,
    commit=400,
    num_rows=4,
    num_tokens=4,
    flops=1000,
    kernels=10,
    seconds=0.5,
)


def made(**figures: Any) -> MeasuredParts:
    return dataclasses.replace(_PARTS, **figures)
