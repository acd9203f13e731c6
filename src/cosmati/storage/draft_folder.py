"""A folder that is there while something is made in it; one that a killed process has left goes at the next start."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cosmati.storage.lock import FileLock

_LOCK, _SUFFIX = "draft.lock", ".draft"


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """Make an empty hidden folder beside a path, and remove it at the end.

    Those of processes that died while they made the same path are removed first; those of living ones stay.

    Args:
        path: what is made in it; its folder has to be there.

    Raises:
        OSError: no folder can be made there.
    """
    own = re.compile(rf"\.{re.escape(path.name)}\.\w+{re.escape(_SUFFIX)}")
    for left in filter(lambda one: own.fullmatch(one.name), list(path.parent.iterdir())):
        _remove_dead(left)
    place, lock = _locked_folder(path)
    with lock:
        try:
            yield place / "files"
        finally:
            shutil.rmtree(place)  # while it's locked: nobody else removes it, too


def _locked_folder(path: Path) -> tuple[Path, FileLock]:
    while True:
        place = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=_SUFFIX))
        (place / "files").mkdir()
        try:
            return place, FileLock(place / _LOCK)
        except (BlockingIOError, FileNotFoundError):
            continue  # Somebody has taken it for a dead one's just now, and removes it.


def _remove_dead(place: Path) -> None:
    if not (place / _LOCK).is_file():
        return  # It's just being made, or isn't one of these.
    try:
        with FileLock(place / _LOCK):
            shutil.rmtree(place, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        return
