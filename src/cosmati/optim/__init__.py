"""Optimizers and learning-rate schedules."""

from __future__ import annotations

from cosmati.optim.optimizers import SGD, AdamW, Muon, Optimizer, assign_parameters, matrices
from cosmati.optim.schedules import WSD, Constant, Cosine, Linear, Schedule

__all__ = [
    "SGD",
    "WSD",
    "AdamW",
    "Constant",
    "Cosine",
    "Linear",
    "Muon",
    "Optimizer",
    "Schedule",
    "assign_parameters",
    "matrices",
]
