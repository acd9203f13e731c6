"""Trackio: a database in a local folder, or a Hugging Face Space."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from cosmati.integrations.tracker import Config, TrackedRun, require


@dataclass(kw_only=True)
class Trackio:
    """Stores each attempt as a run of the group that is named as the run. The folder is Trackio's own (TRACKIO_DIR).

    Trackio has no tags: that an attempt was superseded stands in it as the value `superseded_from_step`.

    Args:
        project: the project's name.
        space: `USER/SPACE` of Hugging Face; empty keeps it here.

    Raises:
        MissingExtraError: trackio isn't installed.
    """

    project: str = "cosmati"
    space: str = ""
    _run: Any = field(default=None, init=False, repr=False)
    _key: str = field(default="", init=False, repr=False)
    _step: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._package = require("trackio", "Trackio")
        self.label, self.rewrites = "trackio", False
        self.where = f"{self.space} {self.project}".strip()

    def _init(self, run: TrackedRun, attempt: int, **options: Any) -> Any:  # noqa: ANN401
        with redirect_stdout(StringIO()):  # It tells how to look at it, in the middle of the progress bar.
            return self._package.init(
                project=self.project,
                # Runs are known by their names alone.
                name=f"{run.title(attempt)} {run.key(attempt)[:6]}",
                group=run.name,
                space_id=self.space or None,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                **options,
            )

    def open(self, run: TrackedRun, attempt: int, first_step: int, config: Config) -> None:
        """Begin a run, or go on with it."""
        told = {**config, "attempt": attempt, "first_step": first_step}
        self._run, self._key, self._step = self._init(run, attempt, config=told), run.key(attempt), first_step

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log; the time is of the call, and the measured one stands beside it."""
        self._step = max(step, self._step)
        self._run.log({**values, "measured_at": time}, step=step)

    def summary(self, values: Mapping[str, float]) -> None:
        """Log values named `summary/...` at the last step."""
        self._run.log({f"summary/{name}": value for name, value in values.items()}, step=self._step)

    def artifact(self, path: Path, digest: str) -> None:
        """Log where it lies and its digest."""
        self._run.log({f"artifact/{path.name}": f"{path} {digest}"}, step=self._step)

    def supersede(self, run: TrackedRun, attempt: int, from_step: int) -> bool:
        """Log it in the attempt's run."""
        is_open = self._run is not None and self._key == run.key(attempt)
        own = self._run if is_open else self._init(run, attempt)
        own.log({"superseded_from_step": float(from_step)}, step=from_step)
        if not is_open:
            self._finish(own)
        return True

    def close(self, outcome: str) -> None:
        """Finish."""
        if self._run is not None:
            self._run.log({"outcome": outcome}, step=self._step)
            self._finish(self._run)
            self._run = None

    @staticmethod
    def _finish(run: Any) -> None:  # noqa: ANN401
        with redirect_stdout(StringIO()):
            run.finish()
