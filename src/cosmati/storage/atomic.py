"""Writes that a crash leaves whole or undone: a draft, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

DRAFT_SUFFIX = ".tmp"


def draft_of(path: Path) -> Path:
    """Return where a file is written before it gets its name: beside it, so that the rename is atomic."""
    return path.with_name(path.name + DRAFT_SUFFIX)


def replace_file(path: Path, data: bytes) -> None:
    """Put a whole file in place; after an error the one before stands, and no draft."""
    replace_files(path.parent, {path.name: data})


def replace_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Put whole files in place one after another, by their paths below a folder; make the folders they need.

    Each folder is synced once, at the end: a file may be durable before those that come ahead of it.
    """
    folders = {folder}
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
        folders.update(parent for parent in path.parents if parent.is_relative_to(folder))
    for one in folders:
        sync(one)


def _replace(path: Path, data: bytes, mode: int = 0o644) -> None:
    draft = draft_of(path)
    try:
        _create(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def publish(draft: Path, path: Path) -> None:
    """Give a finished file or folder its name, durably. What is below a folder is yours to sync."""
    sync(draft)
    draft.replace(path)
    sync(path.parent)


def replace_secret(path: Path, data: bytes) -> None:
    """Put a whole file in place that only its owner may read; after an error the one before stands, and no draft."""
    _replace(path, data, 0o600)
    sync(path.parent)


def create_secret(path: Path, data: bytes) -> None:
    """Write a new file that only its owner may read, durably.

    Raises:
        FileExistsError: it's there already.
    """
    _create(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), data)
    sync(path.parent)


def _create(descriptor: int, data: bytes) -> None:
    try:
        _write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the bytes at the file's position, and wait until they and what reading needs are on disk."""
    _write(descriptor, data)
    getattr(os, "fdatasync", os.fsync)(descriptor)  # not every Unix has fdatasync


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
