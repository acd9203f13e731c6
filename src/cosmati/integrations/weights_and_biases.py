"""Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cosmati.errors import RunError
from cosmati.integrations.tracker import Config, TrackedRun, require, tag_of

_NOT_IN_PROJECT = "/\\#?%:"
_MAX_NAME = 100
"""Characters; W&B takes 128, and the attempt's number comes to it."""


@dataclass(kw_only=True)
class WeightsAndBiases:
    """Stores each attempt as a run of the group that is named as the run.

    Args:
        project: the project's name.
        entity: user or team; empty takes W&B's default.
        mode: `online`, or `offline`: `wandb sync` sends it later.
        folder: where W&B keeps its local files, below `wandb/`.

    Raises:
        MissingExtraError: wandb isn't installed.
        RunError: no such mode, or a project with a character that W&B refuses.
    """

    project: str = "cosmati"
    entity: str = ""
    mode: Literal["online", "offline"] = "online"
    folder: str = "."
    _run: Any = field(default=None, init=False, repr=False)
    _key: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            msg = f"wandb: mode={self.mode} is not known. Use online or offline."
            raise RunError(msg)
        if odd := [one for one in _NOT_IN_PROJECT if one in self.project]:
            msg = (
                f"wandb: project={self.project} has {' '.join(odd)}, which W&B refuses in a project. Give another name."
            )
            raise RunError(msg)
        self._package = require("wandb", "Weights & Biases")
        root = Path(self.folder).expanduser().absolute()
        self.label, self.rewrites = "wandb", False
        # `wandb sync` of a second folder with a run's id drops what the first one had.
        self.replaces = self.mode == "offline"
        self.where = f"{self.entity}/{self.project}" + (f" offline in {root}" if self.mode == "offline" else "")

    def _init(self, run: TrackedRun, attempt: int, **options: Any) -> Any:  # noqa: ANN401
        folder = Path(self.folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        # Its own reading of the console would take what other observers print for this run's.
        settings = self._package.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
        return self._package.init(
            project=self.project,
            entity=self.entity or None,
            id=run.key(attempt),
            name=run._replace(name=run.name[:_MAX_NAME]).title(attempt),
            group=run.name[:_MAX_NAME],
            mode=self.mode,
            dir=str(folder),
            settings=settings,
            **options,
        )

    def open(self, run: TrackedRun, attempt: int, first_step: int, config: Config) -> None:
        """Begin a run, or go on with it."""
        told = {**config, "attempt": attempt, "first_step": first_step}
        resume = None if self.mode == "offline" else "allow"
        self._run, self._key = self._init(run, attempt, config=told, job_type="train", resume=resume), run.key(attempt)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log with W&B's own step, and the time at which it was measured."""
        self._run.log({**values, "_timestamp": time}, step=step)

    def summary(self, values: Mapping[str, float]) -> None:
        """Set the run's summary."""
        self._run.summary.update(dict(values))

    def artifact(self, path: Path, digest: str) -> None:
        """Note where it lies and its digest in the summary."""
        self._run.summary.update({f"artifact/{path.name}": f"{path} {digest}"})

    def supersede(self, run: TrackedRun, attempt: int, from_step: int) -> bool:
        """Tag the attempt's run; one that was closed can't be opened again offline."""
        if self._run is not None and self._key == run.key(attempt):
            _tag(self._run, from_step)
            return True
        if self.mode == "offline":
            return False
        earlier = self._init(run, attempt, resume="allow")
        _tag(earlier, from_step)
        # It came to no checkpoint; without a code W&B would show it as finished from now on.
        earlier.finish(exit_code=1)
        return True

    def close(self, outcome: str) -> None:
        """Finish; W&B shows a run that has failed as such."""
        if self._run is not None:
            self._run.summary.update({"outcome": outcome})
            self._run.finish(exit_code=int(outcome in ("failed", "diverged")))
            self._run = None


def _tag(run: Any, from_step: int) -> None:  # noqa: ANN401  (wandb's)
    run.tags = tuple(dict.fromkeys((*(run.tags or ()), tag_of(from_step))))
