"""A file system of fsspec that fails as it's told: whatever the remote is, the same rules hold."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cosmati.data.opened import CacheOptions
from cosmati.data.shards.cache import DamagedRemoteError
from cosmati.data.shards.remote import RemoteError
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.shard_files import write_source

pytestmark = pytest.mark.timeout(300)
ROWS = [5, 6, 7]


class Faulty(MemoryFileSystem):
    """Raises, by file name, what is next in the list; hands out wrong bytes where it's a function."""

    protocol: ClassVar[str] = "faulty"  # type: ignore[misc]
    store: ClassVar[dict[str, Any]] = {}
    faults: ClassVar[dict[str, list[Any]]] = {}
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        left = self.faults.get(path.rpartition("/")[2], [])
        fault = left.pop(0) if left else None
        if isinstance(fault, BaseException):
            raise fault
        opened = super()._open(path, mode, **options)
        return opened if fault is None else io.BytesIO(fault(opened.read()))


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    folder = write_source(tmp_path / "files", ROWS, compression="gz")
    files = Faulty()
    for path in folder.iterdir():
        files.pipe_file(f"/rows/{path.name}", path.read_bytes())
    yield "faulty://rows"
    Faulty.store.clear()
    Faulty.faults.clear()


def numbers(remote: str, cache: Path) -> list[int]:
    data = StreamingDataset(remote, cache=CacheOptions(cache, deadline_seconds=60))
    return sorted(row["number"] for row in data.__getitems__(range(len(data))))


SHARD = "shard.00001.mds.gz"


@pytest.mark.parametrize(
    "fault",
    [
        TimeoutError("slow"),
        ConnectionResetError("reset"),
        OSError(errno.EIO, "input/output error"),
        lambda data: data[:-9],
        lambda data: b"",
    ],
    ids=["timeout", "reset", "io", "short", "empty"],
)
def test_what_may_pass_is_tried_again(remote: str, tmp_path: Path, fault: Any) -> None:
    Faulty.faults[SHARD] = [fault, fault]
    assert numbers(remote, tmp_path / "cache") == list(range(18))


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (FileNotFoundError("none"), "isn't there"),
        (PermissionError("no"), "may not be read"),
        (OSError(errno.EMFILE, "too many"), "ulimit -n"),
        (OSError(errno.ENOSPC, "full"), "the disk is full"),
    ],
    ids=["missing", "forbidden", "handles", "full"],
)
def test_what_wont_pass_is_told_with_its_mend(remote: str, tmp_path: Path, fault: Any, what: str) -> None:
    Faulty.faults[SHARD] = [fault]
    with pytest.raises(DataError, match=what):
        numbers(remote, tmp_path / "cache")
    assert numbers(remote, tmp_path / "cache") == list(range(18))
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_longer_and_changed_bodies_are_damage(remote: str, tmp_path: Path) -> None:
    Faulty.faults[SHARD] = [lambda data: data + b"more"]
    with pytest.raises(RemoteError, match="has more than"):
        numbers(remote, tmp_path / "cache")
    Faulty.faults[SHARD] = [lambda data: data[:-1] + bytes([data[-1] ^ 1])]
    with pytest.raises(DamagedRemoteError, match="has sha256"):
        numbers(remote, tmp_path / "cache")
    assert numbers(remote, tmp_path / "cache") == list(range(18))
