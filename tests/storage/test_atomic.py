from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmati.storage.atomic import create_secret, draft_of, publish, replace_file, replace_files, write_all


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> list[tuple[str, str]]:
    """What is asked of the kernel for the disk, in order: (call, name of the file or folder)."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def spy_fsync(descriptor: int) -> None:
        names = {path.stat().st_ino: path.name for path in (tmp_path, *tmp_path.rglob("*"))}
        seen.append(("fsync", names[os.fstat(descriptor).st_ino]))
        fsync(descriptor)

    def spy_replace(path: Path, target: Path) -> Path:
        seen.append(("rename", path.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    return seen


def test_a_file_is_synced_before_its_rename_and_its_folder_after(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    replace_file(tmp_path / "a", b"one")
    replace_file(tmp_path / "a", b"two")
    assert calls == 2 * [("fsync", "a.tmp"), ("rename", "a.tmp"), ("fsync", tmp_path.name)]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"two")]


def test_several_files_have_each_folder_on_their_way_synced(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    replace_files(tmp_path, {"x/y/a": b"1", "x/y/b": b"2", "c": b"3"})
    assert [name for call, name in calls if call == "rename"] == ["a.tmp", "b.tmp", "c.tmp"]
    assert sorted(name for call, name in calls[6:]) == sorted(["x", "y", tmp_path.name])
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == {
        "a": b"1",
        "b": b"2",
        "c": b"3",
    }


@pytest.fixture
def small_disk() -> Iterator[None]:
    """A process that may write files of 4 KiB."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_disk")
def test_after_an_error_the_file_before_stands_and_no_draft(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", b"one")
    with pytest.raises(OSError, match="too large"):
        replace_file(tmp_path / "a", bytes(8192))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"one")]


def test_a_draft_is_published_under_its_name(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    path = tmp_path / "folder"
    draft_of(path).mkdir()
    (draft_of(path) / "file").write_bytes(b"content")
    publish(draft_of(path), path)
    assert calls == [("fsync", "folder.tmp"), ("rename", "folder.tmp"), ("fsync", tmp_path.name)]
    assert (path / "file").read_bytes() == b"content"


def test_a_secret_is_its_owners_and_is_never_replaced(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    create_secret(tmp_path / "key", b"secret")
    assert calls == [("fsync", "key"), ("fsync", tmp_path.name)]
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        create_secret(tmp_path / "key", b"other")
    assert (tmp_path / "key").read_bytes() == b"secret"


def test_short_writes_are_gone_on_with_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, synced = os.write, []
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    monkeypatch.setattr(os, "fdatasync", synced.append)
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write_all(descriptor, b"12345678")
    os.close(descriptor)
    assert ((tmp_path / "log").read_bytes(), synced) == (b"12345678", [descriptor])
