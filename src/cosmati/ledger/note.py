"""Signed notes and checkpoints, as C2SP signed-note and tlog-checkpoint define them, with Ed25519."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

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
    """Name and Ed25519 public key (32 bytes) of who signs. `text` is the `vkey` form: name+id+base64.

    Attributes:
        kind: The byte that says, in its id and its text, what the key signs.
    """

    kind: ClassVar[bytes] = ED25519
    name: str
    public: bytes

    def __post_init__(self) -> None:
        """Refuse names that a note can't hold."""
        check_key_name(self.name)

    @property
    def key_id(self) -> bytes:
        """First 4 bytes of SHA-256 over name, newline, type and key."""
        return hashlib.sha256(self.name.encode() + b"\n" + self.kind + self.public).digest()[:_ID_SIZE]

    @property
    def text(self) -> str:
        """The key as one line without a newline."""
        return f"{self.name}+{self.key_id.hex()}+{base64.b64encode(self.kind + self.public).decode()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the `vkey` form; white space around it is dropped.

        Raises:
            LedgerError: it isn't one, or its id doesn't belong to its key.
        """
        parts = text.strip().split("+", 2)
        try:
            name, _, key = parts
            data = decode_base64(key)
            if data[:1] != cls.kind or len(data) != 1 + _KEY_SIZE:
                raise ValueError(f"it isn't an Ed25519 key of the kind {cls.kind.hex()}")
            found = cls(name, data[1:])
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
    return f"{text}\n{signature_line(key, sign(text.encode()))}"


def verify_note(note: bytes, key: VerifierKey) -> str:
    """Return the note's text, signed by `key`. Signatures of other keys are ignored.

    Raises:
        TamperError: not a note, no signature of this key, or a wrong one.
    """
    text, _ = _split_note(note)
    found = [line for line in signature_lines(note) if line.is_of(key)]
    for line in found:
        check_signature(line.signature, text.encode(), key)
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


class SignatureLine(NamedTuple):
    """A signature of a note: whose it says it is, and its bytes. `text` is the whole line with its newline."""

    text: str
    name: str
    key_id: bytes
    signature: bytes

    def is_of(self, key: VerifierKey) -> bool:
        """Return whether it says that it's of this key."""
        return (self.name, self.key_id) == (key.name, key.key_id)


def signature_lines(note: bytes) -> list[SignatureLine]:
    """Return the signatures of a note, none of them checked.

    Raises:
        TamperError: not a note, or a malformed line.
    """
    return [_read_line(line) for line in _split_note(note)[1]]


def _read_line(line: str) -> SignatureLine:
    dash, _, rest = line.partition(" ")
    name, _, encoded = rest.partition(" ")
    try:
        data = decode_base64(encoded)
    except ValueError:
        data = b""
    if dash != _DASH or not name or len(data) <= _ID_SIZE:
        raise TamperError(f"The note has a malformed signature line: {line!r:.120}. Restore it from a copy.")
    return SignatureLine(line + "\n", name, data[:_ID_SIZE], data[_ID_SIZE:])


def signature_line(key: VerifierKey, signature: bytes) -> str:
    """Return a signature as the line of a note."""
    return f"{_DASH} {key.name} {base64.b64encode(key.key_id + signature).decode()}\n"


def check_signature(signature: bytes, message: bytes, key: VerifierKey) -> None:
    """Check an Ed25519 signature.

    Raises:
        TamperError: it isn't of this key over this message.
    """
    try:
        Ed25519PublicKey.from_public_bytes(key.public).verify(signature, message)
    except InvalidSignature as error:
        raise TamperError(
            f"The signature of {key.name} doesn't match the note: text or signature was changed. Restore it."
        ) from error


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


def decode_base64(text: str) -> bytes:
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
    origin, head = read_checkpoint_text(verify_note(note, key))
    if origin != key.name:
        raise TamperError(f"The checkpoint is of the log {origin!r}, not of {key.name!r}. Give the right ledger.")
    return head


def unsigned_checkpoint(note: bytes) -> tuple[str, str, TreeHead]:
    """Return text, origin and head of a checkpoint of which no signature was checked.

    Raises:
        TamperError: it's no checkpoint.
    """
    text, _ = _split_note(note)
    return text, *read_checkpoint_text(text)


def read_checkpoint_text(text: str) -> tuple[str, TreeHead]:
    """Return origin and head.

    Raises:
        TamperError: the text is no checkpoint's.
    """
    lines = text.split("\n")[:-1]
    try:
        origin, size, root = lines[:3]
        head = TreeHead(int(size), decode_base64(root))
    except ValueError as error:
        raise TamperError(f"The note is no checkpoint: {error}. Restore it from a copy.") from error
    if str(head.size) != size or head.size < 0 or len(head.root) != _ROOT_SIZE or "" in lines:
        raise TamperError("The note is no checkpoint: origin, size and root are not as specified. Restore it.")
    return origin, head
