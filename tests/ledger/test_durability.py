"""A model of a disk that keeps only what was synced: at each promise, nothing that it rests on may be missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.writer import LedgerWriter
from cosmati.ledger.writer_lock import WriterLock
from cosmati.storage.atomic import replace_file

from .ledgers import ORIGIN, append_steps, digest, run_entry, write_run

KEY = SigningKey.generate(ORIGIN)


class ForgetfulDisk:
    """Watches what is written, synced, renamed and made. `published` is called where a new name takes a file's place.

    `renamed_into` are the folders whose names aren't all on disk.
    """

    def __init__(self, patch: pytest.MonkeyPatch, published: Callable[[Path], None]) -> None:
        self.unsynced: set[Path] = set()
        self.renamed_into: set[Path] = set()
        self._paths: dict[int, Path] = {}
        self._published = published
        for name in ("open", "close", "write", "fsync", "fdatasync"):
            patch.setattr(os, name, self._watched(name, getattr(os, name)))
        real = Path.replace

        def replace(source: Path, target: Path) -> Path:
            assert source not in self.unsynced, f"{target} is put in place before its content is on disk"
            self._published(target)
            self.renamed_into.add(target.parent)
            return real(source, target)

        patch.setattr(Path, "replace", replace)
        make = Path.mkdir

        def mkdir(folder: Path, *arguments: Any, **options: Any) -> None:
            if not folder.exists():
                self.renamed_into.add(folder.parent)
            make(folder, *arguments, **options)

        patch.setattr(Path, "mkdir", mkdir)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            if name == "open":
                self._paths[result] = Path(arguments[0])
                return result
            path = self._paths.get(arguments[0])
            if name == "close":
                self._paths.pop(arguments[0], None)
            elif path is not None and name == "write":
                self.unsynced.add(path)
            elif path is not None:
                self.unsynced.discard(path)
                self.renamed_into.discard(path)
            return result

        return call

    @property
    def num_open(self) -> int:
        """Files that were opened here and not closed."""
        return len(self._paths)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch, alone: None) -> Iterator[ForgetfulDisk]:
    def published(target: Path) -> None:
        if target.name == "checkpoint":
            assert watched.unsynced == set(), "the head covers entries that aren't on disk"
            is_empty = not (target.parent / "tile").exists()
            assert is_empty or watched.renamed_into == set(), "the head covers tiles whose names aren't on disk"
        if target.name == "wal" and (target.parent / "wal").exists():
            assert target.parent not in watched.renamed_into, "the log goes before the head that covers it is there"

    watched = ForgetfulDisk(monkeypatch, published)
    yield watched
    assert watched.num_open == 0, "every file is closed"


def test_nothing_is_promised_before_it_is_on_disk(tmp_path: Path, forgetful: ForgetfulDisk) -> None:
    with write_run(tmp_path / "l", KEY, 0, every=10_000) as writer:
        assert forgetful.renamed_into == set()
        for start in (0, 3, 300):
            append_steps(writer, range(start, 3 if not start else 300 if start == 3 else 310))
            writer.flush()
            assert forgetful.unsynced == set()
            writer.checkpoint()
            assert forgetful.renamed_into == set()
    with LedgerWriter.open(tmp_path / "l", key=KEY) as writer:
        append_steps(writer, range(310, 312))
    assert (forgetful.unsynced, forgetful.renamed_into) == (set(), set())


def test_a_refused_ledger_is_left_as_it_was_and_can_be_opened(tmp_path: Path, forgetful: ForgetfulDisk) -> None:
    write_run(tmp_path / "l", KEY, 3).close()
    tile = next((tmp_path / "l/tile/entries").rglob("*.p/*"))
    content = tile.read_bytes()
    tile.write_bytes(digest("other"))
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"^(?!.*has a writer).*$"):
            LedgerWriter.open(tmp_path / "l", key=KEY)
        assert forgetful.num_open == 0
    tile.write_bytes(content)
    LedgerWriter.open(tmp_path / "l", key=KEY).close()


def test_a_ledger_that_cannot_be_started_gives_its_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cosmati.ledger.files.publish_head", full)
        with pytest.raises(LedgerError, match="No space left"):
            LedgerWriter.create(tmp_path / "l", origin=ORIGIN, key=KEY)
    lock = WriterLock(tmp_path / "l")
    lock.check()
    lock.release()
    lock.release()


def test_a_lock_that_cannot_be_recorded_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "epoch.tmp").mkdir()
    with pytest.raises(IsADirectoryError):
        WriterLock(tmp_path)
    (tmp_path / "epoch.tmp").rmdir()
    first = WriterLock(tmp_path)
    assert (tmp_path / "epoch").read_text().split()[0] == "1"
    with pytest.raises(LedgerError, match="has a writer already"):
        WriterLock(tmp_path)
    first.release()
    (tmp_path / "epoch").write_text("41 somebody\n")
    with pytest.raises(LedgerError, match="stale"):
        first.check()
    second = WriterLock(tmp_path)
    assert (tmp_path / "epoch").read_text().split()[0] == "42"
    (tmp_path / "epoch").unlink()
    with pytest.raises(LedgerError, match="stale"):
        second.check()
    second.release()
    (tmp_path / "epoch").write_text("no number")
    WriterLock(tmp_path).release()
    assert (tmp_path / "epoch").read_text().split()[0] == "1"


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data[:3])))
    replace_file(tmp_path / "file", b"marble of known origin")
    assert (tmp_path / "file").read_bytes() == b"marble of known origin"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644 & ~umask()


def umask() -> int:
    """Return this process's mask of new files' modes."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_details_come_with_their_entries(tmp_path: Path) -> None:
    with write_run(tmp_path / "l", KEY, 1) as writer:
        with pytest.raises(LedgerError, match="commits to other details"):
            writer.append(run_entry()[0])
        assert writer.size == 2


def test_a_failed_disk_is_the_cause_of_every_error_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write_run(tmp_path / "l", KEY, 1)
    writer.flush()
    failure = OSError(5, "Input/output error")

    def broken(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("cosmati.ledger.files.write_all", broken)
        append_steps(writer, range(1, 2))
        with pytest.raises(LedgerError, match=r"Input/output error.*open the ledger again") as caught:
            writer.flush()
    assert caught.value.__cause__ is failure
    with pytest.raises(LedgerError, match="Input/output error") as caught:
        append_steps(writer, range(2, 3))
    with pytest.raises(LedgerError, match="Input/output error"):
        writer.close()
    with LedgerWriter.open(tmp_path / "l", key=KEY) as again:
        assert again.last_step() is not None
