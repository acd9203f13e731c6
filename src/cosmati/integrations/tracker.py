"""What every tracker can do. None has a word for a run that was begun again: each attempt is a run of a group here."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from cosmati.errors import MissingExtraError

Config = Mapping[str, object]


class TrackedRun(NamedTuple):
    """A run, as trackers name it.

    Attributes:
        name: of its folder.
        identity: hex digits that no other run has, whatever its folder is called.
        starts: of its attempts, by number, in seconds since 1970: a copy of the folder that goes on has others.
    """

    name: str
    identity: str
    starts: Mapping[int, float] = MappingProxyType({})

    def title(self, attempt: int) -> str:
        """Return the name of an attempt: the run's own for the first one."""
        return self.name if attempt == 0 else f"{self.name} (attempt {attempt})"

    def key(self, attempt: int) -> str:
        """Return an attempt's identity: 32 to 50 letters and digits, the same each time."""
        start = self.starts.get(attempt)
        digest = self.identity if start is None else hashlib.sha256(f"{self.identity} {start!r}".encode()).hexdigest()
        return f"{digest[:32]}a{attempt}"


class Tracker(Protocol):
    """A place where values of a run are stored and drawn. One attempt is open at a time; times are seconds since 1970.

    Attributes:
        label: as `--to` names it.
        where: what tells this destination from others of the same label.
        rewrites: what is sent again is stored once.

    One may have `replaces`, too: True where a run that is opened again takes the place of what it was before.
    """

    @property
    def label(self) -> str:
        """Return the name by which `--to` knows it."""
        ...

    @property
    def where(self) -> str:
        """Return what tells this destination from others of the same label."""
        ...

    @property
    def rewrites(self) -> bool:
        """Say whether what is sent again is stored once."""
        ...

    def open(self, run: TrackedRun, attempt: int, first_step: int, config: Config) -> None:
        """Begin, or go on with, an attempt of which nothing after `first_step` is stored yet."""
        ...

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Store values of a step; steps don't decrease."""
        ...

    def summary(self, values: Mapping[str, float]) -> None:
        """Store what came out."""
        ...

    def artifact(self, path: Path, digest: str) -> None:
        """Store where a file or folder lies, and its digest; not its content."""
        ...

    def supersede(self, run: TrackedRun, attempt: int, from_step: int) -> bool:
        """Say of an attempt, open or not, that its steps after this one were taken anew; False where it can't be."""
        ...

    def close(self, outcome: str) -> None:
        """End the attempt; everything is stored when this returns."""
        ...


def require(package: str, what: str) -> Any:  # noqa: ANN401  (a module that needn't be installed)
    """Import a tracker's own package.

    Raises:
        MissingExtraError: it isn't installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = {"comet_ml": "comet-ml", "mlflow.tracking": "mlflow", "torch.utils.tensorboard": "tensorboard"}
        own = name.get(package, package)
        msg = f"{what} needs {own}, which can't be imported ({error}). Run: pip install {own}"
        raise MissingExtraError(msg) from error


def finite(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers; some tools refuse others, and some draw them as 0."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    }


def tag_of(from_step: int) -> str:
    """Return the words for an attempt that was superseded."""
    return f"superseded from step {from_step}"
