"""From a tracker's name and settings, as a person writes them, to the tracker."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from cosmati.errors import RunError
from cosmati.integrations.comet import Comet
from cosmati.integrations.mlflow import MLflow
from cosmati.integrations.tensorboard import TensorBoard
from cosmati.integrations.tracker import Tracker
from cosmati.integrations.trackio import Trackio
from cosmati.integrations.weights_and_biases import WeightsAndBiases

TRACKERS: Mapping[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
    "comet": Comet,
}


def tracker_of(text: str) -> Tracker:
    """Return the tracker that `NAME` or `NAME:setting=value,setting=value` describes.

    Raises:
        RunError: no such tracker, or no such setting.
        MissingExtraError: its package isn't installed.

    Example:
        >>> tracker_of("wandb:project=digits,mode=offline")
    """
    name, _, settings = text.partition(":")
    if name not in TRACKERS:
        msg = f"{name!r} is no tracker.{_near(name, TRACKERS)} There are {', '.join(TRACKERS)}."
        raise RunError(msg)
    kind: Any = TRACKERS[name]
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    given: dict[str, str] = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if not equals or key.strip() not in known:
            msg = (
                f"{name} has no setting {setting.strip()!r}.{_near(key, known)} It has {', '.join(known)}: write "
                f"{name}:{known[0]}=VALUE, with commas between several."
            )
            raise RunError(msg)
        given[key.strip()] = value.strip()
    made: Tracker = kind(**given)
    return made


def _near(name: str, known: Any) -> str:  # noqa: ANN401  (any names)
    near = difflib.get_close_matches(name.strip(), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""
