"""What it costs one process to compute a GPT in U parts: forward and backward of one microbatch, in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import thread_time

import torch
from torch import Tensor

from benchmarks.measure import CLOCK, in_turns, write
from cosmati import LanguageModel
from cosmati.core.virtual_shards import VirtualShards
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.size import count_parameters

LOSS = LanguageModel()
NUMBERS = (0, 0, 2, 4, 8)
"""Of shards; 0 cuts nothing, twice."""


def made(width: int, number: int) -> GPT:
    """Return a GPT of 6 blocks that computes in so many parts."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_length=256, width=width, num_blocks=6, num_heads=8))
    if number:
        model.compute_in_parts(VirtualShards(number))
    return model


def timed(model: GPT, rows: Tensor) -> float:
    """Return the seconds that a microbatch takes forward and backward."""
    start = thread_time()
    LOSS(model, rows).mean().backward()
    return thread_time() - start


def run(*, quick: bool) -> str:
    """Measure two sizes of model with two of microbatch."""
    torch.set_num_threads(1)
    written = []
    for width, num_rows in ((128, 2),) if quick else ((128, 2), (128, 8), (256, 2), (256, 8)):
        rows = torch.randint(256, (num_rows, 257), generator=torch.Generator().manual_seed(1))
        arms: dict[str, Callable[[], float]] = {}
        for number in NUMBERS:
            name = f"U = {number}" if number else "whole, again" if arms else "whole"
            arms[name] = partial(timed, made(width, number), rows)
        found = in_turns(arms, 2 if quick else 15)
        notes = {"parameters": count_parameters(made(width, 0)), "tokens": num_rows * 256, "clock": CLOCK}
        written.append(write(f"virtual_shards_{width}_{num_rows * 256}", found, notes))
    return "\n".join(written)
