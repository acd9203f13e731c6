"""What the processes that share one cache agree on: how much may lie in it, and what is in use.

The bound is over the whole folder, whatever lies there: shards, what is being fetched (by the length it'll have, which
its name says), damaged files set aside, indices. Room is made before a byte is fetched.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from cosmati.data.shards.remote import EnvironmentFaultError
from cosmati.storage.lease import Lease, leases_in
from cosmati.storage.lock import FileLock

PART = ".part"
QUARANTINE = "quarantine"
_PAUSE_SECONDS = 0.02


class CacheFolder:
    """A folder of shards, shared by processes.

    Args:
        root: of the whole cache.
        max_bytes: that may lie in it; None is without an end.
        patience_seconds: how long to wait for room that others hold.
    """

    def __init__(self, root: Path, max_bytes: int | None, patience_seconds: float = 60.0) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self._patience_seconds = patience_seconds

    def lease(self, path: Path) -> Lease:
        """Keep a file from eviction for as long as the lease lasts; the file needn't be there yet."""
        return leases_in(self.root / ".leases").take(self._name(path))

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def refuse_too_small(self, num_bytes: int, what: str) -> None:
        """Refuse a bound that can't hold the largest file beside what always lies there.

        Raises:
            EnvironmentFaultError: it can't; the message says what can.
        """
        if self.max_bytes is None:
            return
        least = num_bytes + self._contents()[0]
        if least > self.max_bytes:
            msg = (
                f"max_bytes={self.max_bytes} of the cache {self.root} can't hold {what}: give {least} or more, for "
                "each process that reads if they aren't to wait for one another."
            )
            raise EnvironmentFaultError(msg)

    @contextmanager
    def part(self, path: Path, num_bytes: int) -> Iterator[tuple[Path, IO[bytes]]]:
        """Make room for a file, and open what is to become it; after an error it's gone.

        Raises:
            EnvironmentFaultError: there isn't room, and there won't be.
        """
        part = path.with_name(f"{path.name}.{num_bytes}{PART}")
        with self._room(part, num_bytes) as lock, lock.path.open("r+b") as file:
            try:
                yield part, file
            except BaseException:
                if lock.is_in_place():
                    lock.path.unlink()
                raise

    def _room(self, part: Path, num_bytes: int) -> FileLock:
        if self.max_bytes is None:
            return FileLock(part, wait=True)
        self.refuse_too_small(num_bytes, part.name)
        end = time.monotonic() + self._patience_seconds
        while True:
            with FileLock(self.root / ".budget", wait=True):
                missing = self._evict(num_bytes)
                if missing <= 0:
                    return FileLock(part, wait=True)
            if time.monotonic() > end:
                msg = (
                    f"The cache {self.root} may hold {self.max_bytes} bytes, and all of them are in use by processes "
                    f"that are reading: {missing} more are needed. Raise max_bytes, or use fewer processes."
                )
                raise EnvironmentFaultError(msg)
            time.sleep(_PAUSE_SECONDS)

    def _contents(self) -> tuple[int, int, list[tuple[bool, int, int, Path]]]:
        """Return bytes that stay, bytes that may go, and the files that may, the first to go first."""
        stay, files = 0, []
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if name.endswith(PART):
                        continue
                    if name.endswith(".shard"):
                        files.append((path.parent.name != QUARANTINE, status.st_atime_ns, status.st_size, path))
                    else:
                        stay += status.st_size
        return stay, sum(size for _, _, size, _ in files), sorted(files)

    def _evict(self, num_bytes: int) -> int:
        """Remove what was opened longest ago and isn't in use until there's room; return how many bytes are missing."""
        assert self.max_bytes is not None, "checked by the caller"
        # Before the rest: what is published in between then counts twice, where it would otherwise not count at all.
        coming = sum(_due(path) for path in self.root.rglob(f"*{PART}") if not _removed_if_dead(path))
        stay, total, files = self._contents()
        missing = stay + total + coming + num_bytes - self.max_bytes
        leases = leases_in(self.root / ".leases")
        for _, _, size, path in files:
            if missing <= 0:
                break
            if leases.unless_leased(self._name(path), partial(path.unlink, missing_ok=True)):
                missing -= size
        return missing


def _due(part: Path) -> int:
    """Return the length that a part is going to have, by its name."""
    length = part.name.removesuffix(PART).rpartition(".")[2]
    return int(length) if length.isdigit() else 0


def _removed_if_dead(path: Path) -> bool:
    """Remove what a dead process left half made; say whether it's gone."""
    with contextlib.suppress(OSError), FileLock(path):
        path.unlink()
        return True
    return False


def sweep(directory: Path) -> None:
    """Remove what dead processes left half made."""
    for pattern in (f"*{PART}", "*.turn"):
        for left in directory.glob(pattern):
            _removed_if_dead(left)
