"""Optimizers and learning-rate schedules."""

from __future__ import annotations

from cosmati.optim.aurora import Aurora
from cosmati.optim.lion import Lion
from cosmati.optim.more_schedules import (
    CosineWarmRestarts,
    Exponential,
    LinearToZero,
    MultiStep,
    Polynomial,
    Step,
)
from cosmati.optim.normuon import NorMuon
from cosmati.optim.optimizers import SGD, AdamW, Muon, Optimizer, assign_parameters, matrices
from cosmati.optim.schedule_free import ScheduleFreeAdamW
from cosmati.optim.schedules import WSD, Constant, Cosine, Linear, Schedule
from cosmati.optim.sgdw import SGDW
from cosmati.optim.soap import SOAP
from cosmati.optim.sophia import Sophia

__all__ = [
    "SGD",
    "SGDW",
    "SOAP",
    "WSD",
    "AdamW",
    "Aurora",
    "Constant",
    "Cosine",
    "CosineWarmRestarts",
    "Exponential",
    "Linear",
    "LinearToZero",
    "Lion",
    "MultiStep",
    "Muon",
    "NorMuon",
    "Optimizer",
    "Polynomial",
    "Schedule",
    "ScheduleFreeAdamW",
    "Sophia",
    "Step",
    "assign_parameters",
    "matrices",
]
