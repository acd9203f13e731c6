"""Write-ahead log: the entries that no checkpoint covers yet, flushed in batches.

    header   magic 8, base u64, root 32, mac 32, checksum 8     root of the tree of `base` entries
    frame    magic 4, first u64, length u32, bundle, mac 32, checksum 8
    bundle   as in tlog-tiles

Integers are big-endian. A checksum is the start of SHA-256 over the part before it. A frame is written only
when the one before is on disk, so a crash can tear the last one alone: damage before a whole frame is
tampering. The mac (HMAC-SHA256, chained from the header on, its secret derived from the operator's key) keeps
others from slipping entries in that the operator would then sign.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.note import TreeHead
from cosmati.ledger.tiles import decode_bundle, encode_bundle
from cosmati.storage.atomic import replace_file, write_all

WAL_FILE = "wal"
_MAGIC = b"COSMWAL1"
_FRAME_MAGIC = b"\xf5WF\x01"
_HEADER = struct.Struct(">8sQ32s")
_FRAME = struct.Struct(">4sQI")
_MAC_SIZE = 32
_SUM_SIZE = 8


@dataclass(frozen=True, slots=True)
class WalFrame:
    """One batch: index of its first entry, its entries, its bytes and their mac."""

    first: int
    entries: tuple[bytes, ...]
    body: bytes
    mac: bytes


@dataclass(frozen=True, slots=True)
class WalContent:
    """The head at a log's start, its header's bytes and mac, its whole frames."""

    head: TreeHead
    body: bytes
    mac: bytes
    frames: tuple[WalFrame, ...]

    @property
    def entries(self) -> dict[int, bytes]:
        """All entries by their index."""
        return {frame.first + i: entry for frame in self.frames for i, entry in enumerate(frame.entries)}

    def authenticate(self, secret: bytes) -> None:
        """Check the chain of macs.

        Raises:
            TamperError: somebody without the operator's key wrote it.
        """
        mac = b""
        parts = [(self.body, self.mac), *((frame.body, frame.mac) for frame in self.frames)]
        for number, (body, expected) in enumerate(parts):
            mac = hmac.digest(secret, mac + body, "sha256")
            if not hmac.compare_digest(mac, expected):
                raise TamperError(
                    f"Part {number} of the write-ahead log wasn't written with this operator's key. "
                    "Restore the file "
                    "from a copy, and find out who changed it."
                )


def _seal(body: bytes, mac: bytes) -> bytes:
    return body + mac + hashlib.sha256(body + mac).digest()[:_SUM_SIZE]


def _is_sealed(data: bytes, body_size: int) -> bool:
    end = body_size + _MAC_SIZE
    return data[end : end + _SUM_SIZE] == hashlib.sha256(data[:end]).digest()[:_SUM_SIZE]


def _read_frame(data: bytes, position: int) -> tuple[WalFrame, int] | None:
    head = data[position : position + _FRAME.size]
    if len(head) < _FRAME.size or head[:4] != _FRAME_MAGIC:
        return None
    _, first, length = _FRAME.unpack(head)
    body_size = _FRAME.size + length
    end = position + body_size + _MAC_SIZE + _SUM_SIZE
    if end > len(data) or not _is_sealed(data[position:end], body_size):
        return None
    body = data[position : position + body_size]
    mac = data[position + body_size : end - _SUM_SIZE]
    return WalFrame(first, tuple(decode_bundle(body[_FRAME.size :])), body, mac), end


def read_wal(directory: Path) -> WalContent:
    """Read the write-ahead log; torn bytes at its end are left alone.

    Raises:
        TamperError: it is missing, or damaged where no crash can damage it.
    """
    path = directory / WAL_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise TamperError(
            f"{path} is missing, and with it entries that may have been flushed. Restore it from a copy."
        ) from error
    position = _HEADER.size + _MAC_SIZE + _SUM_SIZE
    if data[: len(_MAGIC)] != _MAGIC or len(data) < position or not _is_sealed(data[:position], _HEADER.size):
        raise TamperError(f"The header of {path} is damaged. Restore it from a copy.")
    _, base, root = _HEADER.unpack(data[: _HEADER.size])
    frames, expected = [], base
    while (found := _read_frame(data, position)) is not None:
        frame, position = found
        if frame.first != expected:
            raise TamperError(f"{path} lacks the entries {expected} to {frame.first - 1}. Restore it from a copy.")
        frames.append(frame)
        expected += len(frame.entries)
    later = position
    while (later := data.find(_FRAME_MAGIC, later + 1)) >= 0:
        if _read_frame(data, later) is not None:
            raise TamperError(f"{path} is damaged at byte {position}, before a whole frame at {later}. Restore it.")
    body, mac = data[: _HEADER.size], data[_HEADER.size : _HEADER.size + _MAC_SIZE]
    return WalContent(TreeHead(base, root), body, mac, tuple(frames))


class Wal:
    """A write-ahead log that one writer appends to. Making one replaces the file."""

    def __init__(self, directory: Path, secret: bytes, head: TreeHead) -> None:
        path = directory / WAL_FILE
        self._secret = secret
        self._next = head.size
        body = _HEADER.pack(_MAGIC, head.size, head.root)
        self._mac = hmac.digest(secret, body, "sha256")
        replace_file(path, _seal(body, self._mac))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, entries: Sequence[bytes]) -> None:
        """Write one batch and wait until it is on disk."""
        bundle = encode_bundle(entries)
        if len(bundle) >= 1 << 32:
            raise LedgerError("A batch of the write-ahead log is over 4 GiB. Flush more often.")
        body = _FRAME.pack(_FRAME_MAGIC, self._next, len(bundle)) + bundle
        mac = hmac.digest(self._secret, self._mac + body, "sha256")
        write_all(self._descriptor, _seal(body, mac))
        self._mac = mac
        self._next += len(entries)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
