"""Cosignatures of witnesses, as C2SP tlog-cosignature defines them for Ed25519 (`cosignature/v1`).

A cosignature says: at this time this was the largest tree of the log that I had seen, and it went on from all before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from cosmati.errors import TamperError
from cosmati.ledger.note import VerifierKey, check_signature, signature_line, signature_lines, unsigned_checkpoint

_TIME = struct.Struct(">Q")
_MAX_TIME = (1 << 63) - 1
_SIGNATURE_SIZE = 64


@dataclass(frozen=True, slots=True)
class WitnessKey(VerifierKey):
    """Name and public key of a witness. Its text can't be taken for an operator's: the kind is another."""

    kind: ClassVar[bytes] = b"\x04"


@dataclass(frozen=True, slots=True)
class Cosignature:
    """That a witness saw a checkpoint, at this many seconds since 1970 by its own clock."""

    key: WitnessKey
    time: int


def cosign(text: str, key: WitnessKey, time: int, sign: Callable[[bytes], bytes]) -> str:
    """Return the signature line with which a witness cosigns the text of a checkpoint."""
    return signature_line(key, _TIME.pack(time) + sign(_message(text, time)))


def cosignatures(note: bytes, keys: Sequence[WitnessKey]) -> tuple[Cosignature, ...]:
    """Return the cosignatures of a checkpoint that are of these keys; the earliest where one key has several.

    Raises:
        TamperError: no checkpoint, or a line that says it's of one of these keys, and isn't.
    """
    return earliest(every_cosignature(note, keys))


def earliest(given: Iterable[Cosignature]) -> tuple[Cosignature, ...]:
    """Return of each key the first in time."""
    found: dict[WitnessKey, Cosignature] = {}
    for one in given:
        found[one.key] = min(one, found.get(one.key, one), key=attrgetter("time"))
    return tuple(found.values())


def every_cosignature(note: bytes, keys: Sequence[WitnessKey]) -> list[Cosignature]:
    """Return the cosignatures of a checkpoint that are of these keys, in the order of its lines.

    Raises:
        TamperError: as `cosignatures`.
    """
    text, _, _ = unsigned_checkpoint(note)
    found: list[Cosignature] = []
    for line in signature_lines(note):
        for key in keys:
            if not line.is_of(key):
                continue
            if len(line.signature) != _TIME.size + _SIGNATURE_SIZE:
                raise TamperError(f"The cosignature of {key.name} has another length than one has. Restore the note.")
            (time,) = _TIME.unpack(line.signature[: _TIME.size])
            if time > _MAX_TIME:
                raise TamperError(f"The cosignature of {key.name} is of no time that there is. Restore the note.")
            check_signature(line.signature[_TIME.size :], _message(text, time), key)
            found.append(Cosignature(key, time))
    return found


def _message(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()
