"""What a run keeps of those who vouched for its data: enough for a stranger to check it years later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

Reason = Literal["expiry", "revocation", "licence"]
"""Why an authority vouches for a source no longer; that it can't be asked is as if what it signed had expired."""

FOLDER = "provenance"
"""Where the archive lies, in a run's ledger: each file under its SHA-256, so that what a resume adds stands beside."""

POLICY = "policy"
"""What is vouched for where it's no data and no artifact."""

KEPT_FILE = "vouched.json"
"""In a run's folder: the facts of who vouched for its data, oldest first, for who resumes it."""


@dataclass(frozen=True)
class Voucher:
    """That an authority vouches for a source.

    Attributes:
        root: SHA-256 of the authority's first root, in hex.
        target: path under which the source was signed: `TAXONOMY/CLASS/SOURCE/VERSION`.
        manifest_sha256: of its manifest, in hex.
        keyids: of the keys that have signed it.
        expires: when that holds no longer, ISO 8601.
        index_sha256: of the index by which the source's shards are read, in hex; empty where nobody has said.
        others: other versions of the source that are signed, too.
    """

    root: str
    target: str
    manifest_sha256: str
    keyids: tuple[str, ...]
    expires: str
    index_sha256: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class LostVoucher:
    """That an authority vouches for a source no longer.

    Attributes:
        target: path under which the source was signed.
        reason: why.
        because: the same in words.
        root: SHA-256 of the authority's first root, in hex.
    """

    target: str
    reason: Reason
    because: str
    root: str = ""


@dataclass(frozen=True)
class VouchedData:
    """All sources of a run, as they were vouched for when they were opened, or when it was asked again.

    Attributes:
        opened: when that was, ISO 8601; the operator's clock says so.
        vouchers: one for each source that holds; at opening, for each.
        archive: the authorities' files by `ROOT/FILE`, and the manifests as `manifests/SHA256.json`.
        lost: what holds no longer.
    """

    opened: str
    vouchers: tuple[Voucher, ...]
    archive: Mapping[str, bytes]
    lost: tuple[LostVoucher, ...] = field(default=(), kw_only=True)

    @property
    def facts(self) -> dict[str, Any]:
        """What entry 0 says: vouchers, and the digests of the archive's files."""
        vouchers = [asdict(one) | {"keyids": list(one.keyids), "others": list(one.others)} for one in self.vouchers]
        return {"opened": self.opened, "sources": vouchers, "archive": self.digests}

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the archive's files in hex, by their names."""
        return {name: _sha256(data) for name, data in sorted(self.archive.items())}

    @property
    def files(self) -> dict[str, bytes]:
        """The archive by its files' SHA-256 in hex."""
        return {_sha256(data): data for data in self.archive.values()}


@dataclass(frozen=True)
class Withdrawal:
    """What a run does about something that isn't vouched for any more, and from which step on.

    Attributes:
        target: path under which it was signed.
        reason: why it isn't.
        because: the same in words.
        action: `stop`, `reject` the rows of its class, or `skip` the evaluations that read it.
        step: the first at which that is so.
        of: what it is: empty of data, `POLICY`, or the label of an artifact.
        root: SHA-256 of its authority's first root, in hex.
        deletion: how what it has taught is deleted, in words; empty where that isn't asked for.
    """

    target: str
    reason: Reason
    because: str
    action: Literal["stop", "reject", "skip"]
    step: int
    of: str = ""
    root: str = ""
    deletion: str = ""

    @property
    def class_path(self) -> str:
        """Its class; a policy has none."""
        return class_of_target(self.target)

    @property
    def key(self) -> tuple[str, str, str, Reason]:
        """What is withdrawn, and why: it's said once."""
        return self.of, self.root, self.target, self.reason

    def __str__(self) -> str:
        what = {
            "stop": "the run stops",
            "reject": f"rows of {self.class_path} are rejected",
            "skip": f"the {self.of} aren't read any more",
        }[self.action]
        name = f"the {self.of} {self.target}" if self.of and self.action != "skip" else self.target
        said = f"{what} from step {self.step} on, {name} being withdrawn ({self.reason}): {self.because}"
        return f"{said} {self.deletion}".rstrip()


@dataclass(frozen=True)
class Withdrawn:
    """All that was withdrawn from a run so far.

    Attributes:
        seen: when the last of it was found, ISO 8601.
        in_force: what is done about it.
        archive: SHA-256 of the files that bear it out, by their names.
        files: those of them that may not be kept yet, by their SHA-256.
    """

    seen: str
    in_force: tuple[Withdrawal, ...]
    archive: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """What the ledger says of it."""
        in_force = [asdict(one) | {"class": one.class_path} for one in self.in_force]
        return {"seen": self.seen, "in_force": in_force, "archive": dict(self.archive)}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Withdrawn:
        """Read what a ledger says."""
        told = [{name: value for name, value in one.items() if name != "class"} for one in facts["in_force"]]
        return cls(facts["seen"], tuple(Withdrawal(**one) for one in told), facts["archive"])


def together(parts: Sequence[VouchedData]) -> VouchedData:
    """Return what was found of several things as one: as of the earliest time, at which all of it held or didn't."""
    return VouchedData(
        min(one.opened for one in parts),
        tuple(voucher for one in parts for voucher in one.vouchers),
        {name: data for one in parts for name, data in one.archive.items()},
        lost=tuple(lost for one in parts for lost in one.lost),
    )


def class_of_target(target: str) -> str:
    """Return a source's class: what the path says under which it was signed."""
    return "/".join(target.split("/")[1:-2])


@dataclass(frozen=True)
class PolicyPlace:
    """Where a signed policy is from, so that a run can ask again.

    Attributes:
        url: of the authority's repository.
        name: of the policy.
        root: SHA-256 of the authority's first root, in hex.
        state: folder for what was seen of the authority.
        refresh: how often a run asks.
        clock: says what time it is; None is the machine's.
        run: folder of the run that the policy was opened for, which may go on from what it has kept.
    """

    url: str
    name: str
    root: str
    state: str | Path | None = None
    refresh: float | str = "10m"
    clock: Callable[[], datetime] | None = None
    run: Path | None = None


@dataclass(frozen=True)
class VouchedPolicy(VouchedData):
    """A policy as it was vouched for: the archive has its canonical form as the manifest.

    Attributes:
        statement: what its signers say besides. Of a change in mid-run: the `run`'s verifier key, the digest of the
            `previous` policy, and the step `from_step` from which on it may act.
        place: where it's from; None where nobody is to be asked again.
    """

    statement: Mapping[str, str | int]
    place: PolicyPlace | None = field(default=None, kw_only=True, compare=False, repr=False)

    @property
    def voucher(self) -> Voucher:
        """That an authority for policies vouches for it."""
        return self.vouchers[0]

    @property
    def number(self) -> int:
        """Of the version, from 1."""
        return int(self.voucher.target.rpartition("/")[2])

    def is_of(self, place: PolicyPlace) -> bool:
        """Return whether it's a version of the policy that is meant."""
        return (self.voucher.root, self.voucher.target) == (place.root, f"policy/{place.name}/{self.number}")

    @property
    def facts(self) -> dict[str, Any]:
        """What entry 0 says: as of data, and the statement."""
        return {**super().facts, "statement": dict(self.statement)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
