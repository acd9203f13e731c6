"""TensorBoard: a folder of event files for each attempt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep, time
from typing import Any

from cosmati.integrations.tracker import Config, TrackedRun, require, tag_of

_MAX_NAME = 200
"""Bytes; a folder's name has 255 at most."""


@dataclass(kw_only=True)
class TensorBoard:
    """Writes event files below `folder/RUN/attempt-N`.

    What is sent again hides what was there: TensorBoard drops the steps from `purge_step` on of earlier files.

    Args:
        folder: TensorBoard's `--logdir`.

    Raises:
        MissingExtraError: tensorboard isn't installed.
    """

    folder: str = "tensorboard"
    _writer: Any = field(default=None, init=False, repr=False)
    _step: int = field(default=0, init=False, repr=False)
    _time: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._package = require("torch.utils.tensorboard", "TensorBoard")
        self._root = Path(self.folder).expanduser().absolute()
        self.label, self.where, self.rewrites = "tensorboard", str(self._root), True

    def _folder(self, run: TrackedRun, attempt: int) -> str:
        name = run.name.encode(errors="surrogateescape")[:_MAX_NAME].decode(errors="ignore")
        return str(self._root / f"{name}-{run.identity[:6]}" / f"attempt-{attempt}")

    def open(self, run: TrackedRun, attempt: int, first_step: int, config: Config) -> None:
        """Open the attempt's folder."""
        folder = self._folder(run, attempt)
        _wait_for_another_second(Path(folder))
        self._writer = self._package.SummaryWriter(folder, purge_step=first_step + 1)
        self._step, self._time = first_step, None
        told = json.dumps(dict(config), indent=1, default=str, sort_keys=True)
        self._text("config", "".join(f"    {line}\n" for line in told.splitlines()))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add a scalar for each value."""
        self._step, self._time = max(step, self._step), time
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def summary(self, values: Mapping[str, float]) -> None:
        """Add scalars named `summary/...` at the last step."""
        for name, value in values.items():
            self._writer.add_scalar(f"summary/{name}", value, self._step, walltime=self._time)

    def artifact(self, path: Path, digest: str) -> None:
        """Add a text."""
        self._text(f"artifact/{path.name}", f"{path} {digest}")

    def supersede(self, run: TrackedRun, attempt: int, from_step: int) -> bool:
        """Add a text to the attempt's folder."""
        with closing(self._package.SummaryWriter(self._folder(run, attempt))) as writer:
            writer.add_text("attempt", tag_of(from_step), from_step)
        return True

    def close(self, outcome: str) -> None:
        """Write everything."""
        if self._writer is not None:
            self._text("outcome", outcome)
            self._writer.close()
            self._writer = None

    def _text(self, name: str, text: str) -> None:
        self._writer.add_text(name, text, self._step, walltime=self._time)


def _wait_for_another_second(folder: Path) -> None:
    """Files are read in the order of their names, which begin with the second: what purges has to come last."""
    seconds = [name.split(".")[3] for name in (path.name for path in folder.glob("events.out.tfevents.*"))]
    newest = max((int(one) for one in seconds if one.isdigit()), default=0)
    if newest >= int(time()) > newest - 2:
        sleep(newest + 1 - time())
