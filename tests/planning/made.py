"""Measured parts with round figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from cosmati.planning.beside import Beside
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
    first_activations=1600,
    narrow=0,
    widened=0,
    largest_narrow=0,
    is_plain=False,
    changed=0,
    changing=0,
    elsewhere=(),
    unplanned=(),
    beside=Beside(losses=0, look=0, look_cut=0, put_back=0, has_undo=False),
    commit=400,
    num_rows=4,
    num_tokens=4,
    flops=1000,
    kernels=10,
    seconds=0.5,
)


def made(**figures: Any) -> MeasuredParts:
    return dataclasses.replace(_PARTS, **figures)
