"""Keys of operators and witnesses: Ed25519, in a PEM file (PKCS 8, not encrypted) that only its owner may read."""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from cosmati.errors import LedgerError
from cosmati.ledger.cosignature import WitnessKey, cosign
from cosmati.ledger.note import VerifierKey, check_key_name, sign_note
from cosmati.storage.atomic import create_secret


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key and the name under which it signs: the log's origin. Its `repr` doesn't show the key."""

    name: str
    private: Ed25519PrivateKey = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse names that a note can't hold."""
        check_key_name(self.name)

    @classmethod
    def generate(cls, name: str) -> SigningKey:
        """Return a new key."""
        return cls(name, Ed25519PrivateKey.generate())

    @property
    def verifier(self) -> VerifierKey:
        """The public half."""
        return VerifierKey(self.name, self.private.public_key().public_bytes_raw())

    def sign_note(self, text: str) -> str:
        """Return the text (ends in a newline) as a signed note."""
        return sign_note(text, self.verifier, self.private.sign)

    @property
    def witness(self) -> WitnessKey:
        """The public half, of a key with which a witness cosigns."""
        return WitnessKey(self.name, self.verifier.public)

    def cosign(self, text: str, time: int) -> str:
        """Return the line with which a witness cosigns a checkpoint's text, at so many seconds since 1970."""
        return cosign(text, self.witness, time, self.private.sign)

    def derive(self, purpose: str) -> bytes:
        """Return a secret of 32 bytes for another purpose; it doesn't reveal the key."""
        return hmac.digest(self.private.private_bytes_raw(), f"cosmati {purpose} {self.name}".encode(), "sha256")


def create_key(path: Path, *, name: str, whose: str = "operator") -> SigningKey:
    """Write a new key to `path` with mode 0600 and return it; `whose` is for messages.

    Raises:
        LedgerError: the file is there already, or can't be written.
    """
    key = SigningKey.generate(name)
    pem = key.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        create_secret(path, pem)
    except OSError as error:
        raise LedgerError(
            f"The {whose} key {path} can't be created: {error.strerror}. Name a new file in a folder "
            "that you may write."
        ) from error
    return key


def load_key(path: Path, *, name: str, whose: str = "operator") -> SigningKey:
    """Read a key; `whose` is for messages.

    Raises:
        LedgerError: no such file, no Ed25519 key in it, or others than its owner may read or change it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            pem = file.read()
    except OSError as error:
        raise LedgerError(
            f"The {whose} key {path} can't be read: {error.strerror}. Check its path and owner."
        ) from error
    if mode & 0o077:
        raise LedgerError(
            f"The {whose} key {path} has mode {mode:04o}: others than its owner may use it, so a "
            "signature proves "
            f"nothing. Run `chmod 600 {path}`, and make a new key if somebody may have copied it."
        )
    try:
        private = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise LedgerError(f"{path} holds no PEM private key without a password: {error}. Restore the file.") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise LedgerError(f"{path} holds a key that isn't Ed25519. Make one with `create_key`.")
    return SigningKey(name, private)


def load_or_create_key(path: Path, *, name: str) -> SigningKey:
    """Read the key at `path`, or write a new one there; see `load_key` and `create_key`."""
    return load_key(path, name=name) if path.exists() else create_key(path, name=name)
