"""Trackers: TensorBoard, Weights & Biases, MLflow, Trackio and Comet, live and from a run folder."""

from cosmati.integrations.catalogue import TRACKERS, tracker_of
from cosmati.integrations.live import Tracking
from cosmati.integrations.replay import track_run
from cosmati.integrations.tracker import TrackedRun, Tracker

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "Tracking", "track_run", "tracker_of"]
