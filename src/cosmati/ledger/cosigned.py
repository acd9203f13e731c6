"""The cosigned checkpoints of a ledger: one signed note for each size, in `cosigned/`, and how a witness is asked.

The checkpoint is replaced every few seconds; what a witness has cosigned stays. Asking is as C2SP tlog-witness has it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.consistency import prove_consistency
from cosmati.ledger.cosignature import Cosignature, WitnessKey, cosignatures, earliest, every_cosignature
from cosmati.ledger.note import TreeHead, VerifierKey, signature_lines, unsigned_checkpoint, verify_note
from cosmati.ledger.reader import read_signed_head, read_verifier_key
from cosmati.storage.atomic import replace_file
from cosmati.storage.lock import FileLock

FOLDER = "cosigned"
_LOCK = "cosigned.lock"
_DONE, _OTHER_SIZE, _NO_PROOF = 200, 409, 422

Send = Callable[[bytes], tuple[int, bytes]]
"""Sends a request to a witness; returns HTTP's status and the answer. It raises OSError where nobody answers."""


class WitnessRefusedError(LedgerError):
    """A witness doesn't cosign a checkpoint, or doesn't answer."""


class ForkError(WitnessRefusedError, RefutedError):
    """What a witness has seen of a log isn't the beginning of it."""


class CosignedHead(NamedTuple):
    """A head with the cosignatures that it has, the note that holds them, and further ones by the same witnesses."""

    head: TreeHead
    cosignatures: tuple[Cosignature, ...]
    note: bytes
    later: tuple[Cosignature, ...] = ()


def cosigned_heads(directory: Path, keys: Sequence[WitnessKey]) -> list[CosignedHead]:
    """Return the heads that are kept, smallest first, with the cosignatures that these witnesses have given.

    The operator's signature isn't looked at.

    Raises:
        TamperError: a file is none, or a cosignature doesn't verify.
    """
    found = []
    for path in _files(directory):
        try:
            note = path.read_bytes()
            _, _, head = unsigned_checkpoint(note)
            if str(head.size) != path.name:
                raise TamperError(f"it has the name of another size than its own, {head.size}")
            every = every_cosignature(note, keys)
            given = earliest(every)
            found.append(CosignedHead(head, given, note, tuple(one for one in every if one not in given)))
        except TamperError as error:
            raise TamperError(f"{path}: {error}") from error
    return found


def refuse_contradictions(heads: Iterable[CosignedHead]) -> None:
    """Refuse witnesses that say of one time that two trees were the largest.

    Raises:
        TamperError: one does.
    """
    latest: dict[WitnessKey, tuple[int, int]] = {}
    for head, given, _, later in heads:
        # The earliest of a size against the latest of all smaller ones.
        for one in (*given, *sorted(later, key=attrgetter("time"))):
            size, time = latest.get(one.key, (0, 0))
            if one.time < time:
                raise TamperError(
                    f"The witness {one.key.name} contradicts itself: {size} entries at {time}, and {head.size} at the "
                    f"earlier {one.time}. Its clock went back, or somebody has its key: don't count on it."
                )
            latest[one.key] = head.size, one.time


def signed_by_one_of(note: bytes, keys: Iterable[VerifierKey]) -> bool:
    """Return whether the operator signed a note, with any of the keys that the log has had."""
    for key in keys:
        try:
            verify_note(note, key)
        except TamperError:
            continue
        return True
    return False


def ask_witness(directory: Path, witness: WitnessKey, send: Send) -> CosignedHead:
    """Have a witness cosign a ledger's checkpoint, and keep what it says; return that.

    Args:
        directory: the ledger's.
        witness: who is asked.
        send: reaches it.

    Raises:
        ForkError: the log was rolled back or rewritten since it was asked last.
        WitnessRefusedError: it doesn't cosign for another reason, or doesn't answer.
        TamperError: the checkpoint doesn't verify, or a witness has cosigned another one of this size.
    """
    head, note = read_signed_head(directory, read_verifier_key(directory))
    kept = cosigned_heads(directory, [witness])
    known = [one.head.size for one in kept if one.cosignatures and one.head.size <= head.size]
    status, answer = _sent(send, _request(directory, note, max(known, default=0), head.size), witness)
    size = _size_of(answer, witness) if status == _OTHER_SIZE else 0
    if size > head.size:
        # Of a run that goes on, somebody else may have shown it a later one.
        head, note = read_signed_head(directory, read_verifier_key(directory))
    if size > head.size:
        raise ForkError(
            f"Rolled back: {witness.name} has cosigned {size} entries of this log, and this checkpoint covers "
            f"{head.size}. Restore the ledger's newest state: with an older one the witness never goes on."
        )
    if status == _OTHER_SIZE:
        status, answer = _sent(send, _request(directory, note, size, head.size), witness)
    # Of another size than it just said somebody else has asked it meanwhile.
    is_other_root = status == _OTHER_SIZE and size == head.size == _size_of(answer, witness)
    if status == _NO_PROOF or is_other_root:
        raise ForkError(
            f"Forked: the {size or max(known, default=0)} entries of this log that {witness.name} has cosigned aren't "
            "the beginning of this one. One of the two was rewritten."
        )
    if status != _DONE:
        raise WitnessRefusedError(
            f"The witness {witness.name} doesn't cosign ({status}): {answer.decode('utf-8', 'replace').strip():.300}"
        )
    return CosignedHead(head, (_kept(directory, note, answer, witness),), note.encode())


def _request(directory: Path, note: str, old_size: int, size: int) -> bytes:
    proof = prove_consistency(directory, old_size, size)
    lines = [f"old {old_size}", *(base64.b64encode(one).decode() for one in proof), "", note]
    return "\n".join(lines).encode()


def _sent(send: Send, request: bytes, witness: WitnessKey) -> tuple[int, bytes]:
    try:
        return send(request)
    except OSError as error:
        msg = f"The witness {witness.name} doesn't answer: {error}. Ask it again later; nothing is lost."
        raise WitnessRefusedError(msg) from error


def _size_of(answer: bytes, witness: WitnessKey) -> int:
    text = answer.decode("ascii", "replace").removesuffix("\n")
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        raise WitnessRefusedError(f"The witness {witness.name} answers with {text!r:.40} where it should give a size.")
    return int(text)


def _kept(directory: Path, note: str, answer: bytes, witness: WitnessKey) -> Cosignature:
    """Put a cosignature beside those of others; return it."""
    try:
        lines = [line for line in signature_lines(b"cosigned\n\n" + answer) if line.is_of(witness)]
        alone = note.partition("\n\n")[0] + "\n\n" + "".join(line.text for line in lines[:1])
        (given,) = cosignatures(alone.encode(), [witness])
    except (TamperError, ValueError) as error:
        msg = f"The witness {witness.name} answers with no cosignature of its own: {answer!r:.200}. Check its key."
        raise WitnessRefusedError(msg) from error
    keep_cosigned(directory, note, lines[0].text, witness)
    return given


def keep_cosigned(directory: Path, note: str, line: str, witness: WitnessKey) -> None:
    """Keep a cosignature of a checkpoint; of one witness the first and the latest one stay.

    Raises:
        TamperError: there's a cosigned checkpoint of this size and another content.
    """
    text, _, head = unsigned_checkpoint(note.encode())
    path = directory / FOLDER / str(head.size)
    with FileLock(directory / _LOCK, wait=True):
        before = path.read_bytes() if path.exists() else note.encode()
        if unsigned_checkpoint(before)[0] != text:
            msg = f"{path} is another checkpoint of the same size: the log was rewritten, and a witness knows both."
            raise TamperError(msg)
        own = [one.text for one in signature_lines(before) if one.is_of(witness)]
        others = [one.text for one in signature_lines(before) if not one.is_of(witness)]
        replace_file(path, "".join([text, "\n", *others, *own[:1], line]).encode())


def _files(directory: Path) -> list[Path]:
    folder = directory / FOLDER
    names = (
        [path for path in folder.iterdir() if path.name.isascii() and path.name.isdigit()] if folder.is_dir() else []
    )
    return sorted(names, key=lambda path: int(path.name))
