"""Weights signed as OpenSSF's model-signing does it, in key mode: anybody's `model_signing verify key` checks them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from cosmati.errors import LedgerError, MissingExtraError, TamperError
from cosmati.storage.atomic import create_secret

try:
    from model_signing import signing, verifying
except ImportError as error:  # pragma: no cover  (of another environment)
    raise MissingExtraError("Bundles need the extra `audit`: pip install 'cosmati[audit]'.") from error

KEY_FILE = "weights.key.pem"


def public_key_of(path: Path) -> bytes:
    """Return the public half of a run's key for weights (EC P-256), in PEM; a new key is made where there's none.

    Raises:
        LedgerError: it can't be read or written, or is no such key.
    """
    try:
        if not path.exists():
            new = ec.generate_private_key(ec.SECP256R1())
            create_secret(path, new.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise LedgerError(f"The key for weights {path} can't be used: {error}. Restore it, or move it away.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise LedgerError(f"{path} holds no EC P-256 key. Restore it, or move it away: a new one is made then.")
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def sign_weights(folder: Path, signature: Path, key: Path) -> None:
    """Sign all files of a folder."""
    with _quiet():
        signing.Config().use_elliptic_key_signer(private_key=key).sign(folder, signature)


def verify_weights(folder: Path, signature: Path, public_key: Path) -> None:
    """Check that a folder's files are those that were signed, and no others.

    Raises:
        TamperError: they aren't.
    """
    try:
        with _quiet():
            verifying.Config().use_elliptic_key_verifier(public_key=public_key).verify(folder, signature)
    except Exception as error:  # a signature's file is anybody's: whatever reading it raises says that it doesn't hold
        raise TamperError(f"The signature over the weights doesn't hold: {error!r:.300}.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the package logs to itself: its errors come as exceptions."""
    logger = logging.getLogger("model_signing")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
