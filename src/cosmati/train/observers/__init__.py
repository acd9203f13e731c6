"""Observers of a run: they are told what happened, and change nothing."""

from cosmati.train.observers.observer import History, Observer, WatchedRun
from cosmati.train.observers.stopping import EarlyStopping, Threshold
from cosmati.train.outcome import StepOutcome, StepReport

__all__ = ["EarlyStopping", "History", "Observer", "StepOutcome", "StepReport", "Threshold", "WatchedRun"]
