"""The signatures of a repository, followed from its first root to each class, as of any time.

What a stock TUF client does with live metadata, this does with metadata that lie somewhere: a repository before it is
changed, or the archive beside a ledger, which an auditor reads years after everything in it has expired.
(The Update Framework, specification 1.0.33, section 5.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar, cast

from tuf.api.exceptions import LengthOrHashMismatchError, RepositoryError
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.api.serialization import DeserializationError

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.errors import (
    ExpiredMetadataError,
    InconsistentMetadataError,
    OutOfScopeError,
    TamperedManifestError,
    UnsignedMetadataError,
    UntrustedRootError,
)
from cosmati.provenance.authority.names import PolicyName, SourceName, metadata_file, role_of
from cosmati.provenance.rehearsal import REHEARSAL

Reader = Callable[[str], bytes | None]
"""Returns a file of a repository by its name below it, None where it isn't there."""
POLICIES = "x-cosmati-policies"
"""Field of a root that says that its authority signs policies, and no data."""
S = TypeVar("S", Root, Timestamp, Snapshot, Targets)


@dataclass(frozen=True)
class Chain:
    """Metadata that were verified together.

    Attributes:
        roots: from the first that is trusted to the newest.
        timestamp: says which snapshot is the newest.
        snapshot: says which versions belong together.
        targets: by role, those of classes among them.
        problems: what is wrong with the metadata of single classes, by role.
        files: each of these as it was read, by its name below the repository.
    """

    roots: tuple[Metadata[Root], ...]
    timestamp: Metadata[Timestamp]
    snapshot: Metadata[Snapshot]
    targets: Mapping[str, Metadata[Targets]]
    problems: Mapping[str, ProvenanceError]
    files: Mapping[str, bytes]

    @property
    def root(self) -> Root:
        """The newest root."""
        return self.roots[-1].signed

    @property
    def first_root_sha256(self) -> str:
        """Digest of the first root, in hex: what whoever trusts the authority has written down."""
        return hashlib.sha256(self.files[metadata_file("root", 1)]).hexdigest()

    @property
    def holds_policies(self) -> bool:
        """Whether it's an authority for policies: its first root says so, and that is what is pinned."""
        return bool(self.roots[0].signed.unrecognized_fields.get(POLICIES))

    @property
    def is_rehearsal(self) -> bool:
        """Whether all of its keys were made for show: its first root says so."""
        return self.roots[0].signed.unrecognized_fields.get(REHEARSAL) is True

    def check_kind(self, *, policies: bool) -> None:
        """Refuse the authority of policies where one of data is asked, and the other way round.

        Raises:
            UntrustedRootError: it's the other kind.
        """
        if self.holds_policies != policies:
            kinds = ("data", "policies") if policies else ("policies", "data")
            msg = (
                f"The root {self.first_root_sha256[:16]} is that of an authority for {kinds[0]}, which has no say "
                f"about {kinds[1]}. Pin the root of the authority for {kinds[1]}."
            )
            raise UntrustedRootError(msg)

    @property
    def delegations(self) -> Targets:
        """Which keys sign which class."""
        return self.targets[Targets.type].signed

    def delegator_of(self, role: str) -> Root | Targets:
        """Return which metadata name the keys of a role."""
        return self.root if role in self.root.roles else self.delegations

    def source(self, name: SourceName) -> TargetFile:
        """Return length and digest of a source's manifest, as the signers of its class have signed them.

        Raises:
            OutOfScopeError: nobody signs the class, or nobody who may has signed this source.
        """
        self.check_kind(policies=False)
        mend = "Run `cosmati data sign` with their keys, or look whether the source is of another class"
        return self._target(role_of(name.class_path), name.target, name.class_path, mend)

    def policy(self, name: PolicyName) -> TargetFile:
        """Return length and digest of a policy's canonical form, as its signers have signed them.

        Raises:
            OutOfScopeError: nobody signs the policy, or nobody who may has signed this version.
        """
        self.check_kind(policies=True)
        mend = "Run `cosmati policy sign` with their keys, or ask for a number that was signed"
        return self._target(name.role, name.target, name.name, mend)

    def _target(self, role: str, path: str, what: str, mend: str) -> TargetFile:
        if role in self.problems:
            raise self.problems[role]
        delegations = self.delegations.delegations
        delegation = (delegations.roles or {}).get(role) if delegations else None
        if delegation is None:
            raise OutOfScopeError(f"This authority lets nobody sign {what!r}. Ask it to run `cosmati keys delegate`.")
        found = self.targets[role].signed.targets.get(path) if role in self.targets else None
        if found is None or not delegation.is_delegated_path(path):
            raise OutOfScopeError(f"The signers of {what!r} haven't signed {path}. {mend}.")
        return found

    def other_versions(self, name: SourceName) -> tuple[str, ...]:
        """Return the versions of a source that its class's signers have signed beside one of them."""
        start, role = name.target.removesuffix(name.version), role_of(name.class_path)
        signed = [path.removeprefix(start) for path in self.targets[role].signed.targets if path.startswith(start)]
        return tuple(sorted({*signed} - {name.version}))

    def signers(self, role: str) -> tuple[str, ...]:
        """Return the ids of the keys whose signatures of a role's metadata hold."""
        metadata = self.targets[role]
        found = self.delegator_of(role).get_verification_result(role, metadata.signed_bytes, metadata.signatures)
        return tuple(sorted(found.signed))


def read_chain(read: Reader, *, at: datetime | None = None, root_sha256: str = "") -> Chain:
    """Read and verify metadata, from the first root on.

    Args:
        read: the files.
        at: as of when they must not have expired; None doesn't ask.
        root_sha256: digest of the first root, in hex; empty takes any, which proves only that all fits together.

    Raises:
        UntrustedRootError: the first root isn't the trusted one.
        UnsignedMetadataError: a signature is missing or wrong.
        ExpiredMetadataError: something had expired.
        InconsistentMetadataError: files are missing, damaged, or of different states of the repository.
    """
    reading = _Reading(read, at)
    roots = reading.roots(root_sha256)
    timestamp = reading.take("timestamp", None, Timestamp, roots[-1].signed)
    snapshot = reading.take("snapshot", timestamp.signed.snapshot_meta, Snapshot, roots[-1].signed)
    meta = snapshot.signed.meta
    top = reading.take("targets", meta.get("targets.json"), Targets, roots[-1].signed)
    targets, problems = {"targets": top}, dict[str, ProvenanceError]()
    delegations = top.signed.delegations
    for role in (delegations.roles or {}) if delegations else {}:
        if f"{role}.json" in meta:
            try:
                targets[role] = reading.take(role, meta[f"{role}.json"], Targets, top.signed)
            except ProvenanceError as error:  # of one class: the others' signers know nothing of it
                problems[role] = error
    return Chain(roots, timestamp, snapshot, targets, problems, reading.files)


class _Reading:
    """Files as they are read, each verified by the keys that another one names."""

    def __init__(self, read: Reader, at: datetime | None) -> None:
        self.files: dict[str, bytes] = {}
        self._read, self._at = read, at

    def roots(self, first_sha256: str) -> tuple[Metadata[Root], ...]:
        """Return all roots. Each is signed by the keys of the one before and by its own; the last one must hold."""
        first = self._file(metadata_file("root", 1))
        if first_sha256 and hashlib.sha256(first).hexdigest() != first_sha256:
            msg = (
                f"The repository's first root has the SHA-256 {hashlib.sha256(first).hexdigest()}, and {first_sha256} "
                "is trusted. Either it's another authority's, or somebody has replaced it: ask the authority."
            )
            raise UntrustedRootError(msg)
        found = [parsed("1.root.json", first, Root)]
        _verify(found[0].signed, "root", found[0])
        while (data := self._read(name := metadata_file("root", len(found) + 1))) is not None:
            self.files[name] = data
            root = parsed(name, data, Root)
            if root.signed.version != len(found) + 1:
                raise InconsistentMetadataError(f"{name} says that it is version {root.signed.version}.")
            _verify(found[-1].signed, "root", root)
            _verify(root.signed, "root", root)
            found.append(root)
        self._holds("root", found[-1])
        return tuple(found)

    def take(self, role: str, meta: MetaFile | None, kind: type[S], delegator: Root | Targets) -> Metadata[S]:
        """Return a role's metadata, of the version that other metadata name; the timestamp's are named by none."""
        if meta is None and role != "timestamp":
            raise InconsistentMetadataError(f"The snapshot doesn't name {role}. Fetch the whole repository.")
        name = metadata_file(role, meta.version if meta else None)
        data = self._file(name)
        found = parsed(name, data, kind)
        _verify(delegator, role, found)
        if meta is not None:
            if found.signed.version != meta.version:
                msg = f"{name} says that it is version {found.signed.version}: files of different states are mixed."
                raise InconsistentMetadataError(f"{msg} Fetch the whole repository.")
            try:
                meta.verify_length_and_hashes(data)
            except RepositoryError as error:
                raise InconsistentMetadataError(f"{name} isn't the file that is named: {error}.") from error
        self._holds(role, found)
        return found

    def _file(self, name: str) -> bytes:
        data = self._read(name)
        if data is None:
            msg = f"{name} is missing, and other metadata name it. Fetch or restore the whole repository."
            raise InconsistentMetadataError(msg)
        self.files[name] = data
        return data

    def _holds(self, role: str, metadata: Metadata[Any]) -> None:
        if self._at is not None and metadata.signed.is_expired(self._at):
            msg = (
                f"What the authority has signed as {role!r} expired at {metadata.signed.expires:%Y-%m-%d %H:%M} UTC. "
                "Ask it to renew: `cosmati keys renew`. If it says that it has, somebody shows you an old state."
            )
            raise ExpiredMetadataError(msg)


def parsed(name: str, data: bytes, kind: type[S]) -> Metadata[S]:
    """Read metadata of one kind; nothing of them is verified.

    Raises:
        InconsistentMetadataError: they aren't.
    """
    try:
        found: Any = Metadata.from_bytes(data)
    except (DeserializationError, ValueError, RecursionError) as error:
        raise InconsistentMetadataError(f"{name} isn't metadata: {error}. Restore the file.") from error
    if not isinstance(found.signed, kind):
        raise InconsistentMetadataError(f"{name} holds the metadata of another role. Restore the file.")
    return cast("Metadata[S]", found)


def _verify(delegator: Root | Targets, role: str, metadata: Metadata[Any]) -> None:
    try:
        delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError) as error:
        msg = f"The metadata of {role!r} aren't signed by the keys that may: {error}. Nothing in them is trusted."
        raise UnsignedMetadataError(msg) from error


def checked(data: bytes, info: TargetFile) -> bytes:
    """Return a target's content.

    Raises:
        TamperedManifestError: it isn't what was signed.
    """
    try:
        info.verify_length_and_hashes(data)
    except LengthOrHashMismatchError as error:
        raise TamperedManifestError(f"{info.path} isn't what was signed: {error}. Restore the file.") from error
    return data
