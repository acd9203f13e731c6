"""What was made of a run, as far as its folder and those beside it show: each may hold what is to be forgotten."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmati.forget.past_run import PastRun
from cosmati.records.attempts import read_lines
from cosmati.train.run.checkpoints import list_checkpoints, step_of

NOT_COVERED, CLEAN, DELETED = "not covered", "never had it", "deleted"
_OURS = ("damaged-", ".draft-", ".erasing-")
"""How folders begin that are no checkpoint any more, or weren't one yet."""
EVERYWHERE = (
    "copies that nobody can find from here: backups, caches, downloads, deployed models, merges with other weights",
    "the data themselves: delete the rows where they're kept, too",
    "logs of the run's losses and metrics, which are numbers over all its rows",
)
"""What no deletion of a run covers."""


@dataclass(frozen=True)
class Derived:
    """Something that was made of a run.

    Attributes:
        kind: `checkpoint`, `damaged checkpoint`, `export`, `run that began from it` and so on, in words.
        path: where it is, or was; below the run's folder, relative to it.
        step: of the run, at which it was made.
        digest: of its content, in hex; empty where it isn't here.
        status: `not covered`, `never had it` or `deleted`.
    """

    kind: str
    path: str
    step: int
    digest: str
    status: str

    @property
    def is_own(self) -> bool:
        """Whether it lies in the run's folder, and goes with it."""
        return self.kind in ("checkpoint", "damaged checkpoint")


def derived_of(run: PastRun, contact: int) -> tuple[Derived, ...]:
    """Return what was made of a run.

    Args:
        run: of which.
        contact: the first step that had what is to be forgotten: what was made by then never had it.
    """
    return (*_checkpoints(run.folder, contact), *_exports(run.folder, contact), *_children(run.folder, contact))


def _status(step: int, contact: int) -> str:
    return NOT_COVERED if step > contact else CLEAN


def _checkpoints(folder: Path, contact: int) -> Iterator[Derived]:
    """Yield checkpoints; averages are in them."""
    places = folder / "checkpoints"
    for path in reversed(list_checkpoints(places)):
        step = step_of(path)
        yield Derived("checkpoint", f"checkpoints/{path.name}", step, _digest(path), _status(step, contact))
    known = {path.name for path in list_checkpoints(places)}
    for path in sorted(places.iterdir() if places.is_dir() else ()):
        if path.name in known:
            continue
        is_ours, step = path.name.startswith(_OURS), step_of(path)
        kind = "damaged checkpoint" if is_ours else "file of somebody's beside the checkpoints"
        # What says no step may be of any.
        status = _status(step, contact) if step or is_ours else NOT_COVERED
        yield Derived(kind, f"checkpoints/{path.name}", step, _digest(path), status)


def _digest(checkpoint: Path) -> str:
    """Return the digest of the digests of a checkpoint's files."""
    path = checkpoint / "digests.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _exports(folder: Path, contact: int) -> Iterator[Derived]:
    for line in read_lines(folder / "exports.jsonl"):
        step = int(line.get("step", 0))
        yield Derived("export", str(line.get("out", "")), step, str(line.get("weights", "")), _status(step, contact))


def _children(folder: Path, contact: int) -> Iterator[Derived]:
    """Yield runs beside this one that began from its weights."""
    for other in sorted(folder.parent.glob("*/checkpoints")):
        found = list_checkpoints(other)
        if other.parent == folder or not found:
            continue
        try:
            identity = json.loads((found[0] / "state.json").read_text())["identity"]
        except (OSError, ValueError, KeyError):
            continue
        if identity.get("parent.run") == folder.name:
            step = int(identity.get("parent.step") or 0)
            kind, digest = "run that began from it", str(identity.get("parent.root", ""))
            yield Derived(kind, str(other.parent), step, digest, _status(step, contact))
