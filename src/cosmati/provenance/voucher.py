"""What a run keeps of those who vouched for its data: enough for a stranger to check it years later."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FOLDER = "provenance"
"""Where the archive lies, in a run's ledger: each file under its SHA-256, so that what a resume adds stands beside."""


@dataclass(frozen=True)
class Voucher:
    """That an authority vouches for a source.

    Attributes:
        root: SHA-256 of the authority's first root, in hex.
        target: path under which the source was signed: `TAXONOMY/CLASS/SOURCE/VERSION`.
        manifest_sha256: of its manifest, in hex.
        keyids: of the keys that have signed it.
        expires: when that holds no longer, ISO 8601.
    """

    root: str
    target: str
    manifest_sha256: str
    keyids: tuple[str, ...]
    expires: str


@dataclass(frozen=True)
class VouchedData:
    """All sources of a run, as they were vouched for when they were opened.

    Attributes:
        opened: when that was, ISO 8601; the operator's clock says so.
        vouchers: one for each source.
        archive: the authorities' files by `ROOT/FILE`, and the manifests as `manifests/SHA256.json`.
    """

    opened: str
    vouchers: tuple[Voucher, ...]
    archive: Mapping[str, bytes]

    @property
    def facts(self) -> dict[str, Any]:
        """What entry 0 says: vouchers, and the digests of the archive's files."""
        digests = {name: _sha256(data) for name, data in sorted(self.archive.items())}
        vouchers = [asdict(one) | {"keyids": list(one.keyids)} for one in self.vouchers]
        return {"opened": self.opened, "sources": vouchers, "archive": digests}

    @property
    def files(self) -> dict[str, bytes]:
        """The archive by its files' SHA-256 in hex."""
        return {_sha256(data): data for data in self.archive.values()}


@dataclass(frozen=True)
class VouchedPolicy(VouchedData):
    """A policy as it was vouched for: the archive has its canonical form as the manifest.

    Attributes:
        statement: what its signers say besides. Of a change in mid-run: the `run`'s verifier key, the digest of the
            `previous` policy, and the step `from_step` from which on it may act.
    """

    statement: Mapping[str, str | int]

    @property
    def voucher(self) -> Voucher:
        """That an authority for policies vouches for it."""
        return self.vouchers[0]

    @property
    def number(self) -> int:
        """Of the version, from 1."""
        return int(self.voucher.target.rpartition("/")[2])

    @property
    def facts(self) -> dict[str, Any]:
        """What entry 0 says: as of data, and the statement."""
        return {**super().facts, "statement": dict(self.statement)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
