"""Keys of an authority's people: EC P-256, which is what TUF clients read, in files that only their owner may read."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer import CryptoSigner, Key, SSlibKey

from cosmati.errors import ProvenanceError
from cosmati.storage.atomic import create_secret, replace_file

PRIVATE, PUBLIC = ".key.pem", ".pub.pem"
_NAME = re.compile(r"\w[\w.@-]{0,127}", re.ASCII)


def create_key(folder: Path, name: str, *, passphrase: str = "") -> Key:
    """Write a new key as `NAME.key.pem` (mode 0600) and its public half as `NAME.pub.pem`, and return that half.

    Raises:
        ProvenanceError: the files are there already, or can't be written; the name is no file's.
    """
    if not _NAME.fullmatch(name):
        msg = (
            f"The name of a key is {name[:80]!r}, which is no file's. Use letters, digits, '.', '-', '_' and "
            "'@', at most 128, and begin with a letter or a digit."
        )
        raise ProvenanceError(msg)
    private = ec.generate_private_key(ec.SECP256R1())
    lock = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    path = folder / f"{name}{PRIVATE}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (folder / f"{name}{PUBLIC}").exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))  # of a key whose other half is elsewhere
        create_secret(path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
        public = private.public_key()
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        replace_file(folder / f"{name}{PUBLIC}", pem)
    except OSError as error:
        msg = f"The key {path} can't be created: {error.strerror}. Name a new one in a folder that you may write."
        raise ProvenanceError(msg) from error
    return SSlibKey.from_crypto(public)


def read_public_key(path: Path) -> Key:
    """Read the public half of somebody's key.

    Raises:
        ProvenanceError: there's none, or none that a TUF client would take.
    """
    try:
        public = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise ProvenanceError(f"The public key {path} can't be read: {error.strerror}. Check its path.") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        msg = f"{path} holds no public key in PEM: {error}. Ask its owner for NAME{PUBLIC}."
        raise ProvenanceError(msg) from error
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise ProvenanceError(f"{path} holds a key that isn't EC P-256. Make one with `cosmati keys new`.")
    return SSlibKey.from_crypto(public)


class KeyRing:
    """The private keys that lie in some folders, found by the ids of their public halves.

    Args:
        folders: with `NAME.key.pem` and `NAME.pub.pem`.
        passphrase: of the keys that have one.

    Raises:
        ProvenanceError: a public key can't be read.
    """

    def __init__(self, folders: Iterable[Path], *, passphrase: str = "") -> None:
        self._passphrase = passphrase
        self._paths: dict[str, Path] = {}
        for folder in folders:
            for public in sorted(folder.glob(f"*{PUBLIC}")):
                private = public.with_name(public.name.removesuffix(PUBLIC) + PRIVATE)
                if private.exists():
                    self._paths[read_public_key(public).keyid] = private

    @property
    def names(self) -> Mapping[str, str]:
        """Names of the keys by their ids."""
        return {keyid: path.name.removesuffix(PRIVATE) for keyid, path in self._paths.items()}

    def num_of(self, keyids: Iterable[str]) -> int:
        """Return how many of some keys are here."""
        return sum(keyid in self._paths for keyid in keyids)

    def signers(self, keyids: Iterable[str]) -> list[CryptoSigner]:
        """Return those that sign with the keys that are here, of some.

        Raises:
            ProvenanceError: a key can't be read, others than its owner may, or the passphrase isn't its own.
        """
        return [self._load(keyid) for keyid in keyids if keyid in self._paths]

    def _load(self, keyid: str) -> CryptoSigner:
        path = self._paths[keyid]
        try:
            with path.open("rb") as file:
                mode, pem = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read()
        except OSError as error:
            raise ProvenanceError(f"The key {path} can't be read: {error.strerror}. Check its owner.") from error
        if mode & 0o077:
            msg = (
                f"The key {path} has mode {mode:04o}: others than its owner may use it, so a signature proves nothing. "
                f"Run `chmod 600 {path}`, and rotate the key if somebody may have copied it."
            )
            raise ProvenanceError(msg)
        try:
            private = load_pem_private_key(pem, self._passphrase.encode() if b"ENCRYPTED" in pem else None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            msg = f"The key {path} can't be opened: {error}. Give its passphrase in COSMATI_PASSPHRASE."
            raise ProvenanceError(msg) from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ProvenanceError(f"{path} holds a key that isn't EC P-256. Make one with `cosmati keys new`.")
        signer = CryptoSigner(private)
        if signer.public_key.keyid != keyid:
            msg = f"{path} isn't the private half of {path.with_name(path.name.removesuffix(PRIVATE) + PUBLIC).name}."
            raise ProvenanceError(f"{msg} Restore the pair.")
        return signer
