"""Find the runs and studies below a store's folder, and notice which have changed."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmati.store.summary import StoredKind

RUN_FILE, STUDY_FILE, STARTED_FILE, LINES_FILE = "run.json", "study.json", "started.json", "runs.jsonl"
PLANNED_FILE = "planned.json"
STORE_FOLDER = ".cosmati"
"""Of the index, in the store's folder; nothing in it is anybody's run."""
MAX_DEPTH = 6
_WATCHED: dict[StoredKind, tuple[str, ...]] = {
    "run": (RUN_FILE, "steps.jsonl", "evaluations.jsonl"),
    "study": (STUDY_FILE, STARTED_FILE, PLANNED_FILE, LINES_FILE),
}
_PARTS_OF_A_RUN = {"ledger", "checkpoints"}
_IN_A_RUN = "It lies in another run's folder, where no run is looked for. Move it beside that one."
_TICK_NS = 50_000_000
"""A file that was written so lately may be written again without another time: clocks of files tick."""


@dataclass(frozen=True)
class StoreEntry:
    """A folder with a run or with a study's runs.

    Attributes:
        path: Relative to the store.
        kind: Which of both.
        fingerprint: Changes with what the folder says: number, size and time of each watched file.
        problem: Why nothing of it is listed, empty where all is.
    """

    path: str
    kind: StoredKind
    fingerprint: str
    problem: str = ""


def is_plain(path: Path) -> bool:
    """Say whether a path is a plain file: a link may lead out of the store, and a pipe keeps its reader waiting."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def what_is_not_plain(folder: Path) -> Path | None:
    """Return the first that is neither a plain file nor a folder, of a folder and all below it; None where all are."""
    if folder.is_symlink():
        return folder
    for place, folders, files in os.walk(folder):
        for name in sorted(folders):
            if (path := Path(place, name)).is_symlink():
                return path
        for name in sorted(files):
            if not is_plain(path := Path(place, name)):
                return path
    return None


def plain_bytes(path: Path) -> bytes:
    """Return what a plain file holds.

    Raises:
        OSError: it can't be read, or is no plain file.
    """
    if path.exists() and not is_plain(path):
        msg = f"{path} is a link or no plain file, and isn't read"
        raise OSError(msg)
    return path.read_bytes()


def find_sources(root: Path) -> Iterator[StoreEntry]:
    """Yield every run and study below `root`, itself included; links aren't followed, and a run's folder holds none."""
    yield from _below(str(root), ".", 0)


def _below(folder: str, path: str, depth: int) -> Iterator[StoreEntry]:
    files, folders = dict[str, os.DirEntry[str]](), list[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False):  # a pipe of that name would keep its reader waiting
                    files[entry.name] = entry
    except OSError:
        return  # somebody else's, or gone since: what can't be opened isn't ours to list
    kind: StoredKind | None = (
        "run" if RUN_FILE in files else "study" if {STUDY_FILE, STARTED_FILE} & set(files) else None
    )
    if kind is not None:
        yield StoreEntry(path, kind, _fingerprint(files, kind))
    if kind == "run":
        yield from _within_run(folder, path, folders)
    if kind == "run" or depth == MAX_DEPTH:
        return
    for name in sorted(folders):
        if name != STORE_FOLDER:
            yield from _below(f"{folder}/{name}", _joined(path, name), depth + 1)


def _within_run(folder: str, path: str, folders: list[str]) -> Iterator[StoreEntry]:
    """Yield runs that lie in another run's folder, one level down, as problems: who put them there misses them."""
    for name in sorted(set(folders) - _PARTS_OF_A_RUN):
        if is_plain(Path(folder, name, RUN_FILE)):
            yield StoreEntry(_joined(path, name), "run", "in a run", _IN_A_RUN)


def _joined(path: str, name: str) -> str:
    return name if path == "." else f"{path}/{name}"


def _fingerprint(files: dict[str, os.DirEntry[str]], kind: StoredKind) -> str:
    parts, latest = [], 0
    for name in _WATCHED[kind]:
        if name in files:
            try:
                state = files[name].stat(follow_symlinks=False)
            except OSError:
                continue
            parts.append(f"{name}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}")
            latest = max(latest, state.st_mtime_ns)
    if abs(time.time_ns() - latest) < _TICK_NS:
        parts.append(f"read at {time.time_ns()}")  # so that it's read once more
    return " ".join(parts)
