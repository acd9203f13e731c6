"""The bundle: a ZIP archive whose files a signed list names, by size and SHA-256; nothing in it is trusted unread.

What a hostile archive may try is refused before a byte is written: names that lead elsewhere, links, two files of one
name, files that the list doesn't know, and more bytes than it says.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.details import encode_details
from cosmati.storage.atomic import draft_of, publish

LIST_FILE = "bundle.json"
LIST_STATEMENT = "statements/bundle.dsse.json"
FORMAT, VERSION = "cosmati-audit-bundle", 1
_MAX_LIST = 64 << 20
_PART = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Of every file, so that equal content makes equal archives."""
_STORED = (".safetensors",)
"""Numbers: compressing them costs minutes and saves little."""


def list_of(folder: Path, facts: Mapping[str, Any]) -> bytes:
    """Return the list of all files in a folder, canonical JSON, with what it says besides."""
    files = {name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for name, path in _files(folder)}
    return encode_details({"format": FORMAT, "version": VERSION, **facts, "files": files})


def pack(folder: Path, bundle: Path) -> None:
    """Write a folder's files as an archive, whole or not at all."""
    draft = draft_of(bundle)
    try:
        with zipfile.ZipFile(draft, "w", strict_timestamps=True) as archive:
            for name, path in _files(folder):
                info = zipfile.ZipInfo(name, _EPOCH)
                info.external_attr = (stat.S_IFREG | 0o644) << 16
                info.compress_type = zipfile.ZIP_STORED if name.endswith(_STORED) else zipfile.ZIP_DEFLATED
                with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, _PART)
        publish(draft, bundle)
    finally:
        draft.unlink(missing_ok=True)


def unpack(bundle: Path, folder: Path) -> dict[str, Any]:
    """Write a bundle's files into an empty folder, each of them as its list says, and return what the list says.

    Raises:
        LedgerError: it can't be read, or isn't a bundle that this release knows. TamperError: it isn't as its list
            says, or tries something.
    """
    try:
        with bundle.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _unpacked(archive, bundle, folder)
    except LedgerError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:  # a place before the file's beginning, say
            raise TamperError(f"{bundle} isn't a whole ZIP archive: {error}. Ask for it again.") from error
        raise LedgerError(
            f"{error.filename or folder}: {error.strerror or error}. Give a file that can be read."
        ) from error
    except Exception as error:  # an archive is anybody's: whatever reading it raises says that it's none
        raise TamperError(f"{bundle} isn't a whole ZIP archive: {error}. Ask for it again.") from error


def _unpacked(archive: zipfile.ZipFile, bundle: Path, folder: Path) -> dict[str, Any]:
    entries = _checked_entries(archive)
    if LIST_FILE not in entries:
        raise LedgerError(
            f"{bundle} holds no {LIST_FILE}: it isn't an audit bundle. `cosmati audit export` writes one."
        )
    told = _read_list(archive, entries[LIST_FILE])
    files: dict[str, dict[str, Any]] = told["files"]
    known = {LIST_FILE, LIST_STATEMENT, *files}
    if missing := sorted(known - entries.keys()):
        raise TamperError(f"The bundle lacks {', '.join(missing[:5])}, which its list names. Ask for it again.")
    if more := sorted(entries.keys() - known):
        raise TamperError(f"The bundle holds {', '.join(more[:5])}, which its list doesn't name. Ask for it again.")
    total = sum(one["size"] for one in files.values())
    if total > (free := shutil.disk_usage(folder).free):
        raise LedgerError(f"The bundle unpacks to {total:,} bytes, and {free:,} are free in {folder}. Make room.")
    for name in sorted(known):
        limit, digest = (files[name]["size"], files[name]["sha256"]) if name in files else (_MAX_LIST, None)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entries[name]) as source, path.open("xb") as target:
            size, found = _copy(source, target, limit)
        if digest is not None and (size, found) != (limit, digest):
            raise TamperError(f"{name} of the bundle isn't the file that its list names. Ask for it again.")
    return told


def _checked_entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return an archive's files by name, after refusing what a bundle can't hold."""
    entries = dict[str, zipfile.ZipInfo]()
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        is_plain = kind in (0, stat.S_IFREG) and info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if not (is_plain and _NAME.fullmatch(info.filename)):
            raise TamperError(
                f"The bundle holds {info.filename!r:.200}, which is no plain file below it. Don't unpack it."
            )
        entries[info.filename] = info
    folded = [name.lower() for name in entries]
    if len(set(folded)) < len(archive.infolist()):
        raise TamperError("The bundle holds two files of one name. Don't unpack it.")
    return entries


def _read_list(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> dict[str, Any]:
    with archive.open(info) as file:
        data = file.read(_MAX_LIST + 1)
    try:
        told = json.loads(data)
        is_known = told["format"] == FORMAT and told["version"] == VERSION
        is_sound = len(data) <= _MAX_LIST and all(
            _NAME.fullmatch(name)
            and isinstance(one["size"], int)
            and one["size"] >= 0
            and isinstance(one["sha256"], str)
            for name, one in told["files"].items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TamperError(f"The bundle's list isn't of the form that exports write: {error!r}.") from error
    if not is_known:
        raise LedgerError(
            f"The bundle is of the form {told['format']!r:.50} {told['version']!r:.20}, and this release reads "
            f"{FORMAT} {VERSION}. Check it with the release that wrote it."
        )
    if not is_sound:
        raise TamperError("The bundle's list names a file that no bundle can hold. Don't unpack it.")
    return dict(told)


def _copy(source: Any, target: BinaryIO, limit: int) -> tuple[int, str]:  # noqa: ANN401  (a file in an archive)
    """Copy up to a limit, and return how much there was and its SHA-256; a longer one stops one part beyond it."""
    size, digest = 0, hashlib.sha256()
    while size <= limit and (part := source.read(_PART)):
        size += len(part)
        digest.update(part)
        target.write(part)
    return size, digest.hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
