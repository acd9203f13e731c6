"""A witness: it remembers the largest tree of each log that it has seen, and cosigns only what goes on from it.

    <folder>/witness.key             the private key, for its owner alone
             witness.vkey            its name and public key: what auditors are given
             logs/<SHA-256 of the origin>/keys         whose checkpoints it takes, a verifier key a line
                                         /checkpoint   the latest that it cosigned, as a signed note

Requests and answers are those of C2SP tlog-witness (`add-checkpoint`), wherever they come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import NamedTuple

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.consistency import HASH_SIZE, is_consistent
from cosmati.ledger.cosignature import WitnessKey, cosignatures
from cosmati.ledger.cosigned import signed_by_one_of
from cosmati.ledger.keys import create_key, load_key
from cosmati.ledger.note import TreeHead, VerifierKey, decode_base64, unsigned_checkpoint
from cosmati.storage.atomic import replace_file
from cosmati.storage.lock import FileLock
from cosmati.storage.merkle import MerkleTree

MAX_REQUEST_SIZE = 1 << 17
_KEY_FILE, _VKEY_FILE = "witness.key", "witness.vkey"
_MAX_PROOF = 63


class Answer(NamedTuple):
    """What a witness says: HTTP's status, and the text with its type."""

    status: int
    text: str
    content_type: str = "text/plain; charset=utf-8"


class _UnmetError(Exception):
    def __init__(self, status: int, text: str, content_type: str = "text/plain; charset=utf-8") -> None:
        self.answer = Answer(status, text + "\n", content_type)
        super().__init__(text)


def create_witness(folder: Path, name: str) -> WitnessKey:
    """Make a witness with a new key, in a folder that is new or empty.

    Raises:
        LedgerError: there's a witness already, the name can't be one, or the folder can't be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise LedgerError(f"{folder} isn't empty. Name a new folder: a witness's memory and key belong together.")
    folder.mkdir(parents=True, exist_ok=True)
    key = create_key(folder / _KEY_FILE, name=name, whose="witness")
    replace_file(folder / _VKEY_FILE, (key.witness.text + "\n").encode())
    return key.witness


class Witness:
    """A witness, by its folder. Several processes may use one: each answer is given under its lock.

    Args:
        folder: that `create_witness` made.
        now: gives the seconds since 1970.

    Raises:
        LedgerError: no witness there, or others may use its key.
    """

    def __init__(self, folder: Path, *, now: Callable[[], float] = time) -> None:
        try:
            self.key = WitnessKey.parse((folder / _VKEY_FILE).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{folder} holds no witness: {error}. Make one: cosmati ledger witness init {folder} --name NAME."
            raise LedgerError(msg) from error
        self._signer = load_key(folder / _KEY_FILE, name=self.key.name, whose="witness")
        if self._signer.witness != self.key:
            raise LedgerError(f"{folder / _KEY_FILE} isn't the key of {self.key.text}. Restore the folder from a copy.")
        self._folder, self._now = folder, now

    def trust(self, log: VerifierKey) -> None:
        """Take checkpoints of a log from now on; of a log that changes its key, give the new one too."""
        path = self._log(log.name) / "keys"
        with FileLock(self._folder / "lock", wait=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            known = self._keys(log.name)
            if log not in known:
                replace_file(path, "".join(f"{one.text}\n" for one in (*known, log)).encode())

    def knows(self, origin: str) -> tuple[VerifierKey, ...]:
        """Return the keys from which it takes checkpoints of a log; none for a log that it doesn't know."""
        return self._keys(origin)

    def answer(self, request: bytes) -> Answer:
        """Answer an `add-checkpoint`: cosign, or say why not.

        Raises:
            TamperError: its own memory is damaged; it says nothing then.
        """
        try:
            return Answer(200, self._cosigned(request))
        except _UnmetError as refusal:
            return refusal.answer

    def send(self, request: bytes) -> tuple[int, bytes]:
        """Answer as over HTTP, within this process (`cosmati.ledger.cosigned.Send`)."""
        answer = self.answer(request)
        return answer.status, answer.text.encode()

    def _cosigned(self, request: bytes) -> str:
        old_size, proof, note = _read_request(request)
        try:
            text, origin, head = unsigned_checkpoint(note)
        except TamperError as error:
            raise _UnmetError(400, str(error)) from error
        if old_size > head.size:
            raise _UnmetError(400, f"The old size {old_size} is larger than that of the checkpoint, {head.size}.")
        with FileLock(self._folder / "lock", wait=True):
            keys = self._keys(origin)
            if not keys:
                raise _UnmetError(404, f"This witness doesn't know the log {origin}: its owner adds it by its key.")
            if not signed_by_one_of(note, keys):
                raise _UnmetError(403, f"The checkpoint isn't signed by a key that this witness knows for {origin}.")
            before, last_time = self._memory(origin)
            if old_size != before.size or (head.size == before.size and head.root != before.root):
                raise _UnmetError(409, str(before.size), "text/x.tlog.size")
            if not is_consistent(before, head, proof):
                raise _UnmetError(422, f"The proof doesn't lead from the {before.size} entries known here to these.")
            now = int(self._now())
            if now < last_time:
                raise _UnmetError(500, f"The clock here says {now}, and said {last_time} before: put it right.")
            line = self._signer.cosign(text, now)
            # It remembers before it says so.
            replace_file(self._log(origin) / "checkpoint", f"{text}\n{line}".encode())
        return line

    def _log(self, origin: str) -> Path:
        return self._folder / "logs" / hashlib.sha256(origin.encode()).hexdigest()

    def _keys(self, origin: str) -> tuple[VerifierKey, ...]:
        path = self._log(origin) / "keys"
        return tuple(map(VerifierKey.parse, path.read_text("utf-8").splitlines())) if path.exists() else ()

    def _memory(self, origin: str) -> tuple[TreeHead, int]:
        """Return the latest head that it cosigned, and when; what its own key hasn't signed isn't its memory."""
        path = self._log(origin) / "checkpoint"
        if not path.exists():
            return TreeHead(0, MerkleTree().root()), 0
        note = path.read_bytes()
        given = cosignatures(note, [self.key])
        if not given:
            raise TamperError(f"{path} isn't cosigned by this witness. Restore its folder from a copy.")
        return unsigned_checkpoint(note)[2], given[0].time


def _read_request(request: bytes) -> tuple[int, list[bytes], bytes]:
    """Return old size, proof and checkpoint.

    Raises:
        _UnmetError: it isn't of the form that the protocol gives it.
    """
    if len(request) > MAX_REQUEST_SIZE:
        raise _UnmetError(400, f"A request has {MAX_REQUEST_SIZE} bytes at most.")
    head, separator, note = request.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    size = first.removeprefix(b"old ")
    if not separator or not first.startswith(b"old ") or not size.isdigit() or str(int(size[:20])).encode() != size:
        raise _UnmetError(400, "A request begins with `old SIZE`, then a proof, an empty line and the checkpoint.")
    if len(lines) > _MAX_PROOF:
        raise _UnmetError(400, f"A proof has {_MAX_PROOF} lines at most.")
    try:
        proof = [decode_base64(line.decode("ascii")) for line in lines]
    except ValueError as error:
        raise _UnmetError(400, f"A line of the proof doesn't hold: {error}.") from error
    if any(len(one) != HASH_SIZE for one in proof):
        raise _UnmetError(400, f"A line of the proof isn't a hash of {HASH_SIZE} bytes.")
    return int(size), proof, note
