"""Signed notes and checkpoints, as C2SP signed-note and tlog-checkpoint define them, with Ed25519."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cosmati.errors import LedgerError, TamperError

ED25519 = b"\x01"
_KEY_SIZE = 32
_ID_SIZE = 4
_ROOT_SIZE = 32
_MAX_NOTE_SIZE = 1 << 20
_DASH = "\u2014"


@dataclass(frozen=True, slots=True)
class TreeHead:
    """Size of a tree (entries) and its 32-byte root hash."""

    size: int
    root: bytes


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """Name and Ed25519 public key (32 bytes) of who signs. `text` is the `vkey` form: name+id+base64."""

    name: str
    public: bytes

    def __post_init__(self) -> None:
        """Refuse names that a note can't hold."""
        check_key_name(self.name)

    @property
    def key_id(self) -> bytes:
        """First 4 bytes of SHA-256 over name, newline, type and key."""
        return hashlib.sha256(self.name.encode() + b"\n" + ED25519 + self.public).digest()[:_ID_SIZE]

    @property
    def text(self) -> str:
        """The key as one line without a newline."""
        return f"{self.name}+{self.key_id.hex()}+{base64.b64encode(ED25519 + self.public).decode()}"

    @classmethod
    def parse(cls, text: str) -> VerifierKey:
        """Read the `vkey` form; white space around it is dropped.

        Raises:
            LedgerError: it isn't one, or its id doesn't belong to its key.
        """
        parts = text.strip().split("+", 2)
        try:
            name, _, key = parts
            data = _decode_base64(key)
            if data[:1] != ED25519 or len(data) != 1 + _KEY_SIZE:
                raise ValueError("it isn't an Ed25519 key")
            found = cls(name, data[1:])
            Ed25519PublicKey.from_public_bytes(found.public)
            if found.text != text.strip():
                raise ValueError("its id doesn't belong to its name and key")
        except (ValueError, LedgerError) as error:
            raise LedgerError(
                f"{text.strip()!r:.200} is no verifier key: {error}. Give it as name+id+base64, as in operator.vkey."
            ) from error
        return found


def check_key_name(name: str) -> None:
    """Refuse a key name that a signed note can't hold.

    Raises:
        LedgerError: empty, or with a space, a plus or a control character.
    """
    if not name or any(c.isspace() or c == "+" or ord(c) < ord(" ") for c in name) or not _is_utf8(name):
        raise LedgerError(
            f"{name!r} can't name a log or a key: it must have a character, and no space, plus or control "
            "character. Choose something like example.com/run-1."
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def sign_note(text: str, key: VerifierKey, sign: Callable[[bytes], bytes]) -> str:
    """Return the note: the text (ends in a newline) with one signature of `key`, made by `sign`."""
    signature = base64.b64encode(key.key_id + sign(text.encode())).decode()
    return f"{text}\n{_DASH} {key.name} {signature}\n"


def verify_note(note: bytes, key: VerifierKey) -> str:
    """Return the note's text, signed by `key`. Signatures of other keys are ignored.

    Raises:
        TamperError: not a note, no signature of this key, or a wrong one.
    """
    text, lines = _split_note(note)
    verifier, found = Ed25519PublicKey.from_public_bytes(key.public), False
    for line in lines:
        dash, _, rest = line.partition(" ")
        name, _, encoded = rest.partition(" ")
        try:
            signature = _decode_base64(encoded)
        except ValueError:
            signature = b""
        if dash != _DASH or not name or len(signature) <= _ID_SIZE:
            raise TamperError(f"The note has a malformed signature line: {line!r:.120}. Restore it from a copy.")
        if name != key.name or signature[:_ID_SIZE] != key.key_id:
            continue
        try:
            verifier.verify(signature[_ID_SIZE:], text.encode())
        except InvalidSignature as error:
            raise TamperError(
                f"The signature of {key.name} doesn't match the note: text or signature was changed. Restore it."
            ) from error
        found = True
    if not found:
        raise TamperError(
            f"The note isn't signed by {key.name} (key id {key.key_id.hex()}). Check that you hold the right "
            "verifier key; if you do, the note is somebody else's."
        )
    return text


def check_note(note: bytes, what: str) -> None:
    """Refuse what isn't a signed note, whoever signed it: a file that was given by mistake.

    Raises:
        LedgerError: it isn't one.
    """
    try:
        _split_note(note)
    except TamperError as error:
        raise LedgerError(f"{what} can't be read: {error} A `checkpoint` file of the ledger is one.") from error


def _split_note(note: bytes) -> tuple[str, list[str]]:
    try:
        whole = note.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TamperError(f"The note isn't UTF-8 ({error}). Restore it from a copy.") from error
    body, separator, signatures = whole.rpartition("\n\n")
    if len(note) > _MAX_NOTE_SIZE or not separator or not signatures.endswith("\n"):
        raise TamperError("This is no signed note: text, empty line, signatures. Restore it from a copy.")
    if any(ord(c) < ord(" ") and c != "\n" for c in whole):
        raise TamperError("The note has a control character. Restore it from a copy.")
    return body + "\n", signatures[:-1].split("\n")


def _decode_base64(text: str) -> bytes:
    """Decode standard base64, only as an encoder writes it: no other text gives the same bytes."""
    try:
        data = base64.b64decode(text.encode("ascii"))
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"it isn't base64 ({error})") from error
    if base64.b64encode(data).decode() != text:
        raise ValueError("its base64 isn't canonical")
    return data


def checkpoint_text(origin: str, head: TreeHead) -> str:
    """Return the text of a checkpoint."""
    return f"{origin}\n{head.size}\n{base64.b64encode(head.root).decode()}\n"


def parse_checkpoint(note: bytes, key: VerifierKey) -> TreeHead:
    """Return the tree head of a checkpoint that `key` signed, and whose origin is the key's name.

    Raises:
        TamperError: the note doesn't verify or isn't a checkpoint of this log.
    """
    lines = verify_note(note, key).split("\n")[:-1]
    try:
        origin, size, root = lines[:3]
        head = TreeHead(int(size), _decode_base64(root))
    except ValueError as error:
        raise TamperError(f"The note is no checkpoint: {error}. Restore it from a copy.") from error
    if str(head.size) != size or head.size < 0 or len(head.root) != _ROOT_SIZE or "" in lines:
        raise TamperError("The note is no checkpoint: origin, size and root are not as specified. Restore it.")
    if origin != key.name:
        raise TamperError(f"The checkpoint is of the log {origin!r}, not of {key.name!r}. Give the right ledger.")
    return head
