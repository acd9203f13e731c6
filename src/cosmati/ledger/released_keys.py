"""Keys of sealed columns, released: sealed by the operator to the X25519 key of whoever holds a credential.

The file is JSON (RFC 8785)::

    {"format": "cosmati-column-keys/1", "run": name of the log, "credential": SHA-256 in hex,
     "holder": public key in hex, "sender": public key of this once, in hex, "box": base64}

In the box, AES-256-GCM under HKDF-SHA256 of the shared secret, with all else in the file authenticated:
`{class: {column: {block: key in hex}}}`. Who gives the file on gives nothing on; who gives on what they read, does.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import rfc8785
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.sealing import KEY_BYTES, ColumnKeys, OperatorKeys, SealedClasses, boxes_of
from cosmati.records.foreign_json import read_foreign_json

FORMAT = "cosmati-column-keys/1"
_NONCE = bytes(12)
"""Of a key that's used once."""

Covers = Callable[[str, str], bool]
"""Says whether a column of a class may be read."""


def create_holder_key() -> tuple[bytes, str]:
    """Return a new private key in PEM, and its public half in hex."""
    private = X25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem, _public_hex(private.public_key())


def read_holder_key(pem: bytes) -> X25519PrivateKey:
    """Read a holder's private key.

    Raises:
        LedgerError: it's none.
    """
    try:
        found = load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise LedgerError(f"This is no holder's key: {error}. `cosmati keys holder` makes one.") from error
    if not isinstance(found, X25519PrivateKey):
        raise LedgerError("This key is none of a holder's, which are X25519. `cosmati keys holder` makes one.")
    return found


def holder_of(key: X25519PrivateKey) -> str:
    """Return a key's public half in hex: what a credential names."""
    return _public_hex(key.public_key())


def blocks_in(details: Iterable[tuple[int, Mapping[str, Any], SealedClasses]]) -> set[tuple[str, str, int]]:
    """Return class, column and block of all that is sealed in some steps.

    Args:
        details: number, details and what is sealed of each step.
    """
    return {
        (name, column, step // classes.block_steps)
        for step, told, classes in details
        for name, column, _ in boxes_of(told)
    }


def release(
    keys: OperatorKeys, blocks: Iterable[tuple[str, str, int]], covers: Covers, *, holder: str, credential: str
) -> bytes:
    """Return the file of those keys that a credential covers.

    Args:
        keys: all of them.
        blocks: class, column and block of what is sealed.
        covers: what the credential covers.
        holder: public key of who holds it, in hex.
        credential: its digest, in hex.

    Raises:
        LedgerError: it covers nothing that is sealed, or the holder's key is none.
    """
    told = dict[str, dict[str, dict[str, str]]]()
    for name, column, block in sorted(blocks):
        if covers(name, column):
            told.setdefault(name, {}).setdefault(column, {})[str(block)] = keys(name, column, block).hex()
    if not told:
        raise LedgerError("The credential covers nothing that is sealed in these steps. There's nothing to release.")
    once = X25519PrivateKey.generate()
    head = {"format": FORMAT, "run": keys.origin, "credential": credential, "holder": holder}
    head |= {"sender": _public_hex(once.public_key())}
    try:
        shared = once.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(holder)))
    except ValueError as error:
        raise LedgerError(f"The holder's key {holder[:80]!r} is none of X25519: {error}.") from error
    box = AESGCM(_key(shared, head)).encrypt(_NONCE, rfc8785.dumps(told), rfc8785.dumps(head))
    return rfc8785.dumps({**head, "box": base64.b64encode(box).decode()})


def read_released(data: bytes, key: X25519PrivateKey, *, run: str, credential: str, covers: Covers) -> ColumnKeys:
    """Return the keys that were released to the holder of a key, as far as the credential covers them.

    Args:
        data: the file.
        key: the holder's.
        run: name of the log.
        credential: digest of the credential under which they were released, in hex.
        covers: what that covers.

    Raises:
        LedgerError: it's no such file, or was made for another run, credential or holder.
        TamperError: it was changed.
    """
    head, box = check_released(data, run=run, credential=credential, holder=holder_of(key))
    sender = X25519PublicKey.from_public_bytes(bytes.fromhex(head["sender"]))
    try:
        content = AESGCM(_key(key.exchange(sender), head)).decrypt(_NONCE, box, rfc8785.dumps(head))
        found = {
            name: {column: {block: bytes.fromhex(key) for block, key in own.items()} for column, own in columns.items()}
            for name, columns in read_foreign_json(content).items()
        }
    except (InvalidTag, ValueError, TypeError, AttributeError) as error:
        raise TamperError(
            "The file of released keys was changed since the operator wrote it. Ask for it again."
        ) from error

    def of_block(classes: str, column: str, block: int) -> bytes | None:
        return found.get(classes, {}).get(column, {}).get(str(block)) if covers(classes, column) else None

    return of_block


def check_released(data: bytes, *, run: str, credential: str, holder: str) -> tuple[dict[str, str], bytes]:
    """Check for whom keys were released, as their file says: who opens it finds whether that's so.

    Args:
        data: the file.
        run: name of the log.
        credential: digest of the credential, in hex.
        holder: public key of its holder, in hex.

    Returns:
        All that isn't in the box, and the box.

    Raises:
        LedgerError: it's no such file, or was made for another run, credential or holder.
    """
    try:
        head = dict(read_foreign_json(data))
        box = base64.b64decode(head.pop("box"), validate=True)
        X25519PublicKey.from_public_bytes(bytes.fromhex(head["sender"]))
        named = head["format"], head["run"], head["credential"], head["holder"]
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"This is no file of released keys: {error!r:.100}. `cosmati ledger release` writes one."
        ) from error
    for what, told, wanted in zip(
        ("form", "run", "credential", "holder"), named, (FORMAT, run, credential, holder), strict=True
    ):
        if told != wanted:
            msg = f"These keys were released for the {what} {str(told)[:40]!r}, and it's {wanted[:40]!r} here."
            raise LedgerError(f"{msg} Ask the operator for those of this credential: cosmati ledger release.")
    return head, box


def _key(shared: bytes, head: Mapping[str, str]) -> bytes:
    info = rfc8785.dumps([FORMAT, head["sender"], head["holder"]])
    return HKDF(SHA256(), KEY_BYTES, None, info).derive(shared)


def _public_hex(key: X25519PublicKey) -> str:
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
