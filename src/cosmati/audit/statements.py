"""Claims that leave the house: in-toto statements (v1) in DSSE envelopes, signed with the operator's key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cosmati.errors import MissingExtraError, TamperError
from cosmati.ledger.details import encode_details
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import VerifierKey

try:
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError
    from securesystemslib.signer import CryptoSigner, SSlibKey
except ImportError as error:  # pragma: no cover  (of another environment)
    raise MissingExtraError("Bundles need the extra `audit`: pip install 'cosmati[audit]'.") from error

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE = "urn:cosmati:attestation:{}:v1"


def signed_statement(key: SigningKey, kind: str, subjects: Mapping[str, str], predicate: Mapping[str, Any]) -> bytes:
    """Return an envelope: what is said about some files, signed.

    Args:
        key: the operator's.
        kind: of the statement: `bundle`, `training`, `exclusions`.
        subjects: SHA-256 in hex by the file's name.
        predicate: what is said of them.
    """
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(subjects.items())],
        "predicateType": _PREDICATE.format(kind),
        "predicate": predicate,
    }
    envelope = Envelope(encode_details(statement), PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(key.private, _public(key.verifier)))
    return encode_details(envelope.to_dict())


def read_statement(data: bytes, key: VerifierKey, kind: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a statement's subjects and what it says of them, once its signature is found to be the key's.

    Raises:
        TamperError: it isn't an envelope of that kind, or isn't signed with the key.
    """
    try:
        envelope = Envelope.from_dict(json.loads(data))
        envelope.verify([_public(key)], 1)
        statement = json.loads(envelope.payload)
        subjects = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
        found = (envelope.payload_type, statement["_type"], statement["predicateType"])
        predicate = dict(statement["predicate"])
    except (VerificationError, UnverifiedSignatureError) as error:
        raise TamperError(f"The statement {kind!r} isn't signed with the operator's key {key.key_id.hex()}.") from error
    except Exception as error:  # an envelope is anybody's: whatever reading it raises says that it's none
        raise TamperError(
            f"The statement {kind!r} is no in-toto statement in a DSSE envelope: {error!r:.200}."
        ) from error
    if found != (PAYLOAD_TYPE, STATEMENT_TYPE, _PREDICATE.format(kind)):
        raise TamperError(f"The statement {kind!r} says something else: it's of the type {found[2]!r:.100}.")
    return subjects, predicate


def _public(key: VerifierKey) -> SSlibKey:
    return SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(key.public))
