"""A credential: what its holder may read of a run, signed by those who sign the data of the classes in it.

One file, a DSSE envelope around canonical JSON (RFC 8785)::

    {"format": "cosmati-credential/1", "authority": SHA-256 of its first root, "holder": X25519 public key in hex,
     "run": name of the run's log, "classes": [name, ...], "columns": [name, ...], "until": "YYYY-MM-DD"}

`read_credential` is the one place where it's believed. It opens nothing by itself: what it names is sealed, and the
operator releases the keys to its holder (`cosmati ledger release`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import rfc8785

from cosmati.errors import MissingExtraError, ProvenanceError
from cosmati.provenance.authority.chain import Chain, read_chain
from cosmati.provenance.authority.errors import OutOfScopeError, UnsignedMetadataError, UntrustedRootError
from cosmati.provenance.authority.keys import KeyRing
from cosmati.provenance.authority.names import role_of
from cosmati.provenance.authority.trusted import Authority
from cosmati.records.joint_classes import members_of

try:
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError
    from securesystemslib.signer import Key
except ImportError as error:  # pragma: no cover  (of another environment)
    raise MissingExtraError("Credentials need the extra `authority`: pip install 'cosmati[authority]'.") from error

PAYLOAD_TYPE = "application/vnd.cosmati.credential+json"
FORMAT = "cosmati-credential/1"
_HEX = re.compile(r"[0-9a-f]{64}")


class AlteredCredentialError(ProvenanceError):
    """A file isn't a credential, or isn't the one that was signed."""


class ExpiredCredentialError(ProvenanceError):
    """A credential was valid until a day that is over."""


class OtherRunError(ProvenanceError):
    """A credential is for another run."""


class OtherHolderError(ProvenanceError):
    """A credential is somebody else's."""


class RevokedSignerError(ProvenanceError):
    """A credential is signed with a key that its authority doesn't know, or has taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """What somebody may read.

    Attributes:
        authority: SHA-256 of the first root of the authority that signs it, in hex.
        holder: their X25519 public key, in hex.
        run: name of the run's log.
        classes: of whose rows.
        columns: of what is measured of them.
        until: the last day on which it's valid, in UTC.
    """

    authority: str
    holder: str
    run: str
    classes: tuple[str, ...]
    columns: tuple[str, ...]
    until: date

    def __post_init__(self) -> None:
        if not (_HEX.fullmatch(self.authority) and _HEX.fullmatch(self.holder)):
            raise AlteredCredentialError("A credential names its authority and its holder's key in hex. Sign it anew.")
        if not (self.run and self.classes and self.columns):
            raise AlteredCredentialError("A credential names a run, classes and columns. Name at least one of each.")

    def covers(self, classes: str, column: str) -> bool:
        """Say whether it's for a column of a class; of rows of several classes, for all of them."""
        return column in self.columns and {*members_of(classes)} <= {*self.classes}

    @property
    def digest(self) -> str:
        """SHA-256 of its content, in hex: what keys that are released under it name."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return what is signed."""
        told = {**asdict(self), "classes": sorted(self.classes), "columns": sorted(self.columns)}
        return rfc8785.dumps({"format": FORMAT, **told, "until": self.until.isoformat()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Credential:
        """Read what is signed.

        Raises:
            AlteredCredentialError: it isn't of that form.
        """
        try:
            told = json.loads(data)
            found = cls(
                authority=told["authority"],
                holder=told["holder"],
                run=told["run"],
                classes=tuple(told["classes"]),
                columns=tuple(told["columns"]),
                until=date.fromisoformat(told["until"]),
            )
            is_same = found.to_bytes() == data
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise AlteredCredentialError(f"This is no credential: {error!r:.100}. Ask whoever sent it.") from error
        if not is_same:
            raise AlteredCredentialError(f"This is no credential of the form {FORMAT}. Ask whoever sent it.")
        return found


def sign_credential(credential: Credential, chain: Chain, ring: KeyRing, before: bytes | None = None) -> bytes:
    """Sign a credential with the keys at hand, and return its file.

    Args:
        credential: what may be read.
        chain: of the authority: who may sign the classes.
        ring: the keys at hand.
        before: the file with what others have signed of it.

    Raises:
        OutOfScopeError: nobody may sign one of the classes, or none of the keys here may.
        AlteredCredentialError: `before` is another credential's.
    """
    envelope = Envelope(credential.to_bytes(), PAYLOAD_TYPE, {}) if before is None else _envelope(before)
    if envelope.payload != credential.to_bytes():
        raise AlteredCredentialError("The file is there, and is another credential. Name another --out.")
    keyids = dict.fromkeys(keyid for name in credential.classes for keyid in _may_sign(chain, name)[0])
    for name in credential.classes:
        if not ring.num_of(own := _may_sign(chain, name)[0]) and not {*envelope.signatures} & {*own}:
            may = ", ".join(keyid[:12] for keyid in own)
            msg = f"None of the keys here may sign for {name!r}: {may} may. Give theirs with --keys, or leave it out."
            raise OutOfScopeError(msg)
    for signer in ring.signers(keyids):
        envelope.sign(signer)
    return rfc8785.dumps(envelope.to_dict())


def lacking(data: bytes, chain: Chain) -> dict[str, int]:
    """Return how many signatures a credential lacks, by class; nothing where it's signed by all who have to."""
    envelope = _envelope(data)
    found = dict[str, int]()
    for name in Credential.from_bytes(envelope.payload).classes:
        keyids, threshold = _may_sign(chain, name)
        if (missing := threshold - len({*envelope.signatures} & {*keyids})) > 0:
            found[name] = missing
    return found


def read_credential(data: bytes, chain: Chain, *, run: str, now: datetime, holder: str | None = None) -> Credential:
    """Return a credential, once it's found that those who may have signed it, for this run, and that it's valid.

    Args:
        data: its file.
        chain: of the data authority: as it is now, or as a run's ledger has archived it.
        run: name of the run's log.
        now: the time.
        holder: public key of who asks, X25519 in hex; None where the keys are sealed to whom it names.

    Raises:
        AlteredCredentialError: it's none, or was changed since it was signed.
        RevokedSignerError: it's signed with keys that the authority doesn't know, or doesn't any more.
        OutOfScopeError: it's signed by those of other classes, or of another authority.
        UnsignedMetadataError: too few have signed it.
        OtherRunError, OtherHolderError, ExpiredCredentialError: what they're called.
    """
    envelope = _envelope(data)
    found = Credential.from_bytes(envelope.payload)
    chain.check_kind(policies=False)
    if found.authority != chain.first_root_sha256:
        msg = f"The credential is of the authority {found.authority[:16]}, and {chain.first_root_sha256[:16]} is asked."
        raise OutOfScopeError(f"{msg} Give --authority and --root of the one that has signed it.")
    for name in found.classes:
        _check_signed(envelope, chain, name)
    if found.run != run:
        raise OtherRunError(f"The credential is for the run {found.run!r}, and this is {run!r}. Ask for one of this.")
    if holder is not None and found.holder != holder:
        raise OtherHolderError(
            f"The credential is for the holder of the key {found.holder[:16]}, and {holder[:16]} is given. Give the "
            "key that it was made for: --holder-key."
        )
    if now.astimezone(UTC).date() > found.until:
        raise ExpiredCredentialError(f"The credential was valid until {found.until}. Ask its signers for a new one.")
    return found


def run_named_in(data: bytes) -> str:
    """Return the run that a credential is for, as it says: nobody has checked it yet.

    Raises:
        AlteredCredentialError: it's none.
    """
    return Credential.from_bytes(_envelope(data).payload).run


def signers_of(
    archive: Path, facts: Iterable[Mapping[str, Any] | None], *, authority: str = "", root: str = ""
) -> Chain:
    """Return who may sign for which class: as their authority says now, or as a run's ledger has archived it.

    Args:
        archive: folder of the ledger's archive.
        facts: who vouches for the data, as entry 0 and each amendment say it (`VouchedData.facts`).
        authority: where to ask the authority now; empty for the archive, which knows no later revocation.
        root: SHA-256 of its first root, in hex; empty takes the one that the ledger names.

    Raises:
        ProvenanceError: the ledger names no authority, or others than is asked; or what it says can't be trusted.
    """
    archives = {str(source["root"]): one["archive"] for one in facts if one for source in one["sources"]}
    named = ", ".join(archives)
    if root and archives and root not in archives:
        raise UntrustedRootError(f"The ledger's data are vouched for by {named}, and not by {root}. Give that --root.")
    if not root and len(archives) != 1:
        found = f"names {len(archives)} authorities" if archives else "names no data authority"
        raise UntrustedRootError(f"The ledger {found}. Say whose credential it is: --authority URL --root SHA256.")
    root = root or named
    if authority:
        return Authority(authority, root).refresh()
    if root not in archives:
        raise UntrustedRootError("The ledger has archived nothing of this authority. Say where it is: --authority URL.")
    own: Mapping[str, str] = archives[root]

    def read(name: str) -> bytes | None:
        digest = own.get(f"{root}/{name}", "")
        path = archive / digest
        return path.read_bytes() if _HEX.fullmatch(digest) and path.is_file() else None

    return read_chain(read, root_sha256=root)


def _check_signed(envelope: Envelope, chain: Chain, class_path: str) -> None:
    keyids, threshold = _may_sign(chain, class_path)
    known = _keys(chain)
    own = [signature for signature in envelope.signatures.values() if signature.keyid in keyids]
    for signature in own:
        try:
            known[signature.keyid].verify_signature(signature, envelope.pae())
        except (UnverifiedSignatureError, VerificationError) as error:
            msg = f"The credential isn't what {signature.keyid[:12]} has signed: it was changed. Ask for it again."
            raise AlteredCredentialError(msg) from error
    if len(own) >= threshold:
        return
    if own:
        msg = f"The credential has {len(own)} of {threshold} signatures for {class_path!r}. The others have to sign it."
        raise UnsignedMetadataError(msg)
    others = [keyid for keyid in envelope.signatures if keyid in known]
    if others:
        raise OutOfScopeError(
            f"The credential is signed by {', '.join(keyid[:12] for keyid in others)}, who may not sign for "
            f"{class_path!r}. Ask those who may: {', '.join(keyid[:12] for keyid in keyids)}."
        )
    raise RevokedSignerError(
        f"The credential is signed by {', '.join(keyid[:12] for keyid in envelope.signatures) or 'nobody'}, and the "
        "authority knows no such key, or has taken it back. Ask for one that is signed with a key of today."
    )


def _may_sign(chain: Chain, class_path: str) -> tuple[list[str], int]:
    """Return the ids of the keys that may sign a class, and how many of them must."""
    delegations = chain.delegations.delegations
    found = (delegations.roles or {}).get(role_of(class_path)) if delegations else None
    if found is None:
        raise OutOfScopeError(f"Nobody may sign for {class_path!r}. Run `cosmati keys delegate`, or leave it out.")
    return list(found.keyids), found.threshold


def _keys(chain: Chain) -> Mapping[str, Key]:
    """Return the keys that may sign any class, by their ids."""
    delegations = chain.delegations.delegations
    return delegations.keys if delegations else {}


def _envelope(data: bytes) -> Envelope:
    try:
        envelope = Envelope.from_dict(json.loads(data))
    except Exception as error:  # it's anybody's: whatever reading it raises says that it's none
        raise AlteredCredentialError(f"This is no credential: {error!r:.100}. Ask whoever sent it.") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise AlteredCredentialError(f"This is no credential, but {envelope.payload_type!r:.80}. Ask whoever sent it.")
    return envelope
