"""Keys of an authority's people: EC P-256, which is what TUF clients read.

They lie in files that only their owner may read, or on tokens.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer import CryptoSigner, Key, Signer, SSlibKey

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.tokens import AskPin, TokenKey, TokenSigner, find_key, generate_key
from cosmati.storage.atomic import create_secret, replace_file

PRIVATE, TOKEN, PUBLIC = ".key.pem", ".key.uri", ".pub.pem"
_NAME = re.compile(r"\w[\w.@-]{0,127}", re.ASCII)


def create_key(folder: Path, name: str, *, passphrase: str = "") -> Key:
    """Write a new key as `NAME.key.pem` (mode 0600) and its public half as `NAME.pub.pem`, and return that half.

    Raises:
        ProvenanceError: the files are there already, or can't be written; the name is no file's.
    """
    _refuse_name(folder, name)
    private = ec.generate_private_key(ec.SECP256R1())
    lock = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock)
    return _keep(folder / f"{name}{PRIVATE}", secret, SSlibKey.from_crypto(private.public_key()))


def create_token_key(folder: Path, name: str, place: TokenKey, ask_pin: AskPin) -> Key:
    """Write where a key is that stays on a token as `NAME.key.uri`, and its public half beside; return that half.

    Args:
        folder: of both.
        name: of the key.
        place: the token; a key that's on it already by its number, and a new one is made where that's 0.
        ask_pin: for the token's PIN.

    Raises:
        ProvenanceError: as `create_key`; or the token can't be used.
        MissingExtraError: python-pkcs11 isn't installed.
    """
    _refuse_name(folder, name)
    ask_pin = cache(ask_pin)
    place, key = find_key(place, ask_pin) if place.number else generate_key(place, name, ask_pin)
    return _keep(folder / f"{name}{TOKEN}", f"{place.uri}\n".encode(), key)


def _refuse_name(folder: Path, name: str) -> None:
    """Refuse a key before it's made: one that is there under this name, or has its other half elsewhere."""
    if not _NAME.fullmatch(name):
        msg = (
            f"The name of a key is {name[:80]!r}, which is no file's. Use letters, digits, '.', '-', '_' and "
            "'@', at most 128, and begin with a letter or a digit."
        )
        raise ProvenanceError(msg)
    for suffix in (PRIVATE, TOKEN, PUBLIC):
        if (folder / f"{name}{suffix}").exists():
            raise _cannot_create(folder / f"{name}{suffix}", os.strerror(errno.EEXIST))


def _keep(path: Path, content: bytes, key: SSlibKey) -> Key:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        create_secret(path, content)
        replace_file(path.with_name(f"{_name_of(path)}{PUBLIC}"), key.keyval["public"].encode())
    except OSError as error:
        raise _cannot_create(path, error.strerror) from error
    return key


def _cannot_create(path: Path, why: str | None) -> ProvenanceError:
    return ProvenanceError(f"The key {path} can't be created: {why}. Name a new one in a folder that you may write.")


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


def public_names(folders: Iterable[Path]) -> dict[str, str]:
    """Return the names of the public keys that lie in some folders, by their ids; what can't be read is left out."""
    found = {}
    for folder in folders:
        for path in sorted(folder.glob(f"*{PUBLIC}")):
            with suppress(ProvenanceError):
                found[str(read_public_key(path).keyid)] = path.name.removesuffix(PUBLIC)
    return found


class KeyRing:
    """The keys that lie in some folders, found by the ids of their public halves.

    Args:
        folders: with `NAME.key.pem`, or `NAME.key.uri` of a token, and `NAME.pub.pem`.
        passphrase: of the keys that have one.
        ask_pin: for a token's PIN, by its label; it's asked once for each.

    Raises:
        ProvenanceError: a public key can't be read.
    """

    def __init__(self, folders: Iterable[Path], *, passphrase: str = "", ask_pin: AskPin | None = None) -> None:
        self._passphrase, self._ask_pin = passphrase, cache(ask_pin or _nobody_to_ask)
        self._paths: dict[str, Path] = {}
        for folder in folders:
            for public in sorted(folder.glob(f"*{PUBLIC}")):
                name = public.name.removesuffix(PUBLIC)
                private = next((one for end in (PRIVATE, TOKEN) if (one := folder / f"{name}{end}").exists()), None)
                if private is not None:
                    self._paths[read_public_key(public).keyid] = private

    @property
    def names(self) -> Mapping[str, str]:
        """Names of the keys by their ids."""
        return {keyid: _name_of(path) for keyid, path in self._paths.items()}

    def num_of(self, keyids: Iterable[str]) -> int:
        """Return how many of some keys are here."""
        return sum(keyid in self._paths for keyid in keyids)

    def signers(self, keyids: Iterable[str]) -> list[Signer]:
        """Return those that sign with the keys that are here, of some.

        Raises:
            ProvenanceError: a key can't be read, others than its owner may, or the passphrase isn't its own; its token
                isn't there.
        """
        return [self._load(keyid) for keyid in keyids if keyid in self._paths]

    def _load(self, keyid: str) -> Signer:
        path = self._paths[keyid]
        try:
            with path.open("rb") as file:
                mode, content = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read()
        except OSError as error:
            raise ProvenanceError(f"The key {path} can't be read: {error.strerror}. Check its owner.") from error
        if mode & 0o077:
            msg = (
                f"The key {path} has mode {mode:04o}: others than its owner may use it, so a signature proves nothing. "
                f"Run `chmod 600 {path}`, and rotate the key if somebody may have copied it."
            )
            raise ProvenanceError(msg)
        signer = self._on_token(path, content) if path.name.endswith(TOKEN) else self._in_file(path, content)
        if signer.public_key.keyid != keyid:
            raise ProvenanceError(f"{path} isn't the private half of {_name_of(path)}{PUBLIC}. Restore the pair.")
        return signer

    def _in_file(self, path: Path, pem: bytes) -> Signer:
        try:
            private = load_pem_private_key(pem, self._passphrase.encode() if b"ENCRYPTED" in pem else None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            msg = f"The key {path} can't be opened: {error}. Give its passphrase in COSMATI_PASSPHRASE."
            raise ProvenanceError(msg) from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ProvenanceError(f"{path} holds a key that isn't EC P-256. Make one with `cosmati keys new`.")
        return CryptoSigner(private)

    def _on_token(self, path: Path, uri: bytes) -> Signer:
        try:
            place = TokenKey.of_uri(uri.decode(errors="replace"))
        except ProvenanceError as error:
            raise ProvenanceError(f"{path} names no key on a token. {error}") from error
        return TokenSigner(*find_key(place, self._ask_pin), self._ask_pin)


def _nobody_to_ask(token: str) -> str:
    raise ProvenanceError(f"The token {token!r} wants its PIN, and there's nobody to ask: give `ask_pin`.")


def _name_of(path: Path) -> str:
    return path.name.removesuffix(PRIVATE).removesuffix(TOKEN)
