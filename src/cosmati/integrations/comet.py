"""Comet, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmati.integrations.tracker import Config, TrackedRun, require, tag_of


@dataclass(kw_only=True)
class Comet:
    """Stores each attempt as an experiment, tagged with the run's name.

    Args:
        project: the project's name.
        workspace: empty takes Comet's default.
        offline_folder: where archives are written for `comet upload`; empty sends them now.

    Raises:
        MissingExtraError: comet_ml isn't installed.
    """

    project: str = "cosmati"
    workspace: str = ""
    offline_folder: str = ""
    _experiment: Any = field(default=None, init=False, repr=False)
    _key: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        self._package = require("comet_ml", "Comet")
        self.label, self.rewrites = "comet", False
        self.where = f"{self.workspace}/{self.project} {self.offline_folder}".strip()

    def _start(self, run: TrackedRun, attempt: int) -> Any:  # noqa: ANN401
        quiet = {"log_code": False, "log_graph": False, "log_env_details": False, "auto_output_logging": False}
        config = self._package.ExperimentConfig(
            offline_directory=self.offline_folder or None, disabled=False, parse_args=False, **quiet
        )
        return self._package.start(
            workspace=self.workspace or None,
            project_name=self.project,
            experiment_key=run.key(attempt),
            mode="get_or_create",
            online=not self.offline_folder,
            experiment_config=config,
        )

    def open(self, run: TrackedRun, attempt: int, first_step: int, config: Config) -> None:
        """Begin an experiment, or go on with it."""
        self._experiment, self._key = self._start(run, attempt), run.key(attempt)
        self._experiment.set_name(run.title(attempt))
        self._experiment.add_tag(run.name)
        self._experiment.log_parameters({**config, "attempt": attempt, "first_step": first_step})

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log metrics; the time is of the call, and the measured one stands beside it."""
        self._experiment.log_metrics({**values, "measured_at": time}, step=step)

    def summary(self, values: Mapping[str, float]) -> None:
        """Log others named `summary/...`."""
        for name, value in values.items():
            self._experiment.log_other(f"summary/{name}", value)

    def artifact(self, path: Path, digest: str) -> None:
        """Log where it lies and its digest."""
        self._experiment.log_other(f"artifact/{path.name}", f"{path} {digest}")

    def supersede(self, run: TrackedRun, attempt: int, from_step: int) -> bool:
        """Tag the attempt's experiment; one that was closed can't be opened again offline."""
        if self._experiment is not None and self._key == run.key(attempt):
            self._experiment.add_tag(tag_of(from_step))
            return True
        if self.offline_folder:
            return False
        earlier = self._start(run, attempt)
        earlier.add_tag(tag_of(from_step))
        earlier.end()
        return True

    def close(self, outcome: str) -> None:
        """End the experiment."""
        if self._experiment is not None:
            self._experiment.log_other("outcome", outcome)
            self._experiment.end()
            self._experiment = None
