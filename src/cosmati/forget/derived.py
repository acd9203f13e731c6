"""What was made of a run, as far as its folder and those beside it show: each may hold what is to be forgotten."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cosmati.errors import CosmatiError
from cosmati.forget.past_run import PastRun
from cosmati.forget.shredding import superseded_by
from cosmati.records.attempts import read_lines
from cosmati.records.copies import read_copied_to
from cosmati.train.run.checkpoints import is_step_name, list_checkpoints, step_of
from cosmati.train.run.copy_place import CopyPlace

NOT_COVERED, CLEAN, DELETED = "not covered", "never had it", "deleted"
COPY = "copy of a checkpoint"
UNSEEN = "place of copies that can't be found or looked at now"
TAKEN = "place of copies to which another run copies by now"
OF_EARLIER, LOST = "checkpoint of a run that this one succeeds", "run that this one succeeds, which isn't where it was"
_OURS = ("damaged-", ".draft-", ".erasing-")
"""How folders begin that are no checkpoint any more, or weren't one yet."""
_PLACE_SECONDS = 20.0
"""For a place that doesn't answer: whoever asks for a plan waits for it."""
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
        step: of the run, at which it was made; of what can't be looked at, the newest that it may have.
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
    folder = run.folder
    found = (*_checkpoints(folder, contact), *_exports(folder, contact), *_children(folder, contact))
    return (*found, *_of_earlier(run, contact), *copies_of(run, contact))


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


def _of_earlier(run: PastRun, contact: int) -> Iterator[Derived]:
    """Yield the checkpoints of the runs that this one succeeds: they had the rows at the same steps."""
    for folder in superseded_by(run.folder):
        if not folder.exists():
            yield Derived(LOST, str(folder), run.num_steps, "", NOT_COVERED)
        for one in _checkpoints(folder, contact):
            yield replace(one, kind=OF_EARLIER, path=str(folder / one.path))


def copies_of(run: PastRun, contact: int) -> Iterator[Derived]:
    """Yield what is in the places to which a run, and those that it succeeds, have copied checkpoints.

    A run notes each place before anything goes there. What isn't shown to be the run's own is named as a whole.
    """
    for folder in (run.folder, *superseded_by(run.folder)):
        for url in dict.fromkeys(one.url for one in read_copied_to(folder)):
            place = CopyPlace(url, deadline_seconds=_PLACE_SECONDS)
            try:
                token = place.token()
                if token in place.tokens_of(folder):
                    yield from [_copy(place, name, contact) for name in sorted(place.files())]
                    continue
            except (CosmatiError, OSError):
                token = ""
            # A wrong endpoint, or a disk that isn't mounted, looks empty.
            yield Derived(TAKEN if token else UNSEEN, url, run.num_steps, "", NOT_COVERED)


def _copy(place: CopyPlace, name: str, contact: int) -> Derived:
    told, step = place.digests(name), step_of(Path(name))
    status = _status(step, contact) if is_step_name(name) else NOT_COVERED
    return Derived(COPY, f"{place.url}/{name}", step, hashlib.sha256(told).hexdigest() if told else "", status)
