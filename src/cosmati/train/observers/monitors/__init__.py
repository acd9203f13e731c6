"""What is measured of a run while it goes on: gradients, updates, speed, memory, activations, the loss's health."""

from cosmati.train.observers.monitors.activations import ActivationStatistics
from cosmati.train.observers.monitors.losses import LossHealth
from cosmati.train.observers.monitors.machine import MemoryUse, SystemLoad
from cosmati.train.observers.monitors.monitor import Monitor, Monitors
from cosmati.train.observers.monitors.norms import GradientNorms, LearningRates, UpdateNorms
from cosmati.train.observers.monitors.speed import EstimatedEnd, Throughput, flops_per_row

__all__ = [
    "ActivationStatistics",
    "EstimatedEnd",
    "GradientNorms",
    "LearningRates",
    "LossHealth",
    "MemoryUse",
    "Monitor",
    "Monitors",
    "SystemLoad",
    "Throughput",
    "UpdateNorms",
    "all_monitors",
    "flops_per_row",
]


def all_monitors(*, every: int = 10) -> Monitors:
    """Return every monitor that needs no settings, in one observer."""
    own = (
        LearningRates(),
        GradientNorms(),
        UpdateNorms(),
        Throughput(),
        EstimatedEnd(),
        MemoryUse(),
        SystemLoad(),
        ActivationStatistics(),
        LossHealth(),
    )
    return Monitors(own, every=every)
