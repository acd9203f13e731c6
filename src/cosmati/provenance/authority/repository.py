"""An authority's repository, as who keeps it sees it: plain files that any TUF client reads from a folder or a server.

metadata/1.root.json, 2.root.json ...   who may sign what; signed by the keys before it and its own
metadata/N.targets.json                 the taxonomy, and which keys sign which class
metadata/N.class.open.permissive.json   the sources of a class, signed by its own people
metadata/N.policy.main.json             the versions of a policy likewise, in an authority for policies
metadata/N.snapshot.json                which versions of these belong together
metadata/timestamp.json                 which snapshot is the newest; written last, so a change is there or isn't
change.json                             a new root's files, while they're put in place: the next command ends that
targets/...                             taxonomies and manifests, by digest and name
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import rfc8785
from tuf.api.exceptions import UnsignedMetadataError
from tuf.api.metadata import (
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import POLICIES, Chain, checked, parsed, read_chain
from cosmati.provenance.authority.errors import InconsistentMetadataError, TamperedManifestError
from cosmati.provenance.authority.keys import KeyRing
from cosmati.provenance.authority.names import (
    TOP_ROLES,
    is_repository_file,
    metadata_file,
    target_file,
    taxonomy_target,
)
from cosmati.provenance.authority.taxonomies import NUMBER, number_of, published
from cosmati.provenance.rehearsal import REHEARSAL
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.storage.atomic import replace_files
from cosmati.storage.lock import FileLock

_CHANGE = "change.json"


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """For how many days what is signed holds. Nobody opens data of an authority whose timestamp has expired: renew it.

    Args:
        root: who may sign what.
        targets: the delegations.
        source: a class's sources.
        snapshot: which versions belong together.
        timestamp: which snapshot is the newest. For so long can somebody on the way show an old state as the newest.
    """

    root: int = 365
    targets: int = 365
    source: int = 365
    snapshot: int = 30
    timestamp: int = 7

    def until(self, role: str, now: datetime) -> datetime:
        """Return when metadata of a role expire that are signed now."""
        days = getattr(self, role) if role in TOP_ROLES else self.source
        return (now + timedelta(days=days)).replace(microsecond=0)


class TooFewSignaturesError(ProvenanceError):
    """Fewer keys have signed than must. `metadata` holds the signatures so far."""

    def __init__(self, message: str, role: str, metadata: Metadata[Any]) -> None:
        super().__init__(message)
        self.role, self.metadata = role, metadata


@dataclass(kw_only=True)
class RepositoryChange:
    """What one command changes: roles as they will be, signed when it ends.

    Attributes:
        chain: the repository as it is; None while it's made.
        ring: the keys at hand.
        roles: metadata that will be signed anew, by role.
        target_files: contents of new targets by their files.
        signed: metadata that are signed already, by role: what several people have signed one after another.
    """

    chain: Chain | None
    ring: KeyRing
    roles: dict[str, Any] = field(default_factory=dict)
    target_files: dict[str, bytes] = field(default_factory=dict)
    signed: dict[str, Metadata[Any]] = field(default_factory=dict)

    def root(self) -> Root:
        """Return the root, to be changed."""
        found: Root = self._role("root", self.chain.roots[-1] if self.chain else None, Root())
        return found

    def targets(self, role: str = "targets") -> Targets:
        """Return the targets of a role, to be changed; empty where it has signed none yet."""
        found: Targets = self._role(role, self.chain.targets.get(role) if self.chain else None, Targets())
        return found

    def delegations(self) -> Delegations:
        """Return which keys sign which class, to be changed."""
        targets = self.targets()
        targets.delegations = targets.delegations or Delegations({}, {})
        return targets.delegations

    def _role(self, role: str, now: Metadata[Any] | None, first: Any) -> Any:  # noqa: ANN401  (TUF's kinds of metadata)
        if role not in self.roles:
            self.roles[role] = copy.deepcopy(now.signed) if now else first
            # What is signed by nobody who may any more is begun anew, under a version that nobody has seen.
            seen = self.chain.snapshot.signed.meta.get(f"{role}.json") if self.chain else None
            last = now.signed.version if now else seen.version if seen else 0
            self.roles[role].version = last + 1
        return self.roles[role]

    def take_over(self, role: str, pending: Path, *, now: datetime, until: datetime) -> None:
        """Go on with what others have signed already, where that is exactly this change; else it's begun anew.

        Args:
            role: of a class.
            pending: file that anybody may have put there.
            now: its metadata hold now.
            until: and no longer than this.
        """
        try:
            found = parsed(pending.name, pending.read_bytes(), Targets)
        except (FileNotFoundError, InconsistentMetadataError):
            return
        mine = copy.deepcopy(self.targets(role))
        mine.expires = found.signed.expires
        if found.signed != mine or not now < mine.expires <= until:
            return
        # A signature that doesn't hold would stand in the way of the person's own.
        delegator = self.roles.get("targets") or (self.chain.delegations if self.chain else Targets())
        valid = delegator.get_verification_result(role, found.signed_bytes, found.signatures).signed
        found.signatures = {keyid: one for keyid, one in found.signatures.items() if keyid in valid}
        if valid:
            self.signed[role] = found

    def add_target(self, role: str, path: str, data: bytes, **custom: int | str) -> None:
        """Let a role sign a target, and what is said of it besides."""
        info = TargetFile.from_data(path, data, ["sha256"])
        if custom:
            info.unrecognized_fields["custom"] = custom
        self.targets(role).targets[path] = info
        self.target_files[target_file(path, info.hashes["sha256"])] = data


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class AuthorityRepository:
    """The repository in a folder.

    Args:
        folder: that it lies in.
        lifetimes: of what is signed from now on.
        clock: says what time it is.
    """

    folder: Path
    lifetimes: Lifetimes = Lifetimes()
    clock: Callable[[], datetime] = _now

    def chain(self) -> Chain:
        """Return what is there, verified but for expiry.

        Raises:
            ProvenanceError: there's no repository, or it doesn't verify.
        """
        self._refuse_none()
        try:
            return read_chain(self._read)
        except ProvenanceError as error:
            if not (self.folder / _CHANGE).exists():
                raise
            msg = (
                f"A new root of {self.folder} was broken off half-way. Run `cosmati keys renew {self.folder}`: it puts "
                "the rest in place."
            )
            raise ProvenanceError(msg) from error

    def _refuse_none(self) -> None:
        if not self._read(metadata_file("root", 1)):
            msg = f"{self.folder} holds no authority's repository. Make one with `cosmati keys init {self.folder}`."
            raise ProvenanceError(msg)

    def refuse_one(self) -> None:
        """Refuse to make another repository where there's one.

        Raises:
            ProvenanceError: there is.
        """
        if self._read(metadata_file("root", 1)):
            raise ProvenanceError(f"{self.folder} holds an authority's repository already. Name another folder.")

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def target(self, info: TargetFile) -> bytes:
        """Return a target's content.

        Raises:
            TamperedManifestError: it's missing, or isn't what was signed.
        """
        data = self._read(target_file(info.path, info.hashes.get("sha256", "")))
        if data is None:
            raise TamperedManifestError(f"{info.path} was signed, and its file is missing. Restore {self.folder}.")
        return checked(data, info)

    def create(
        self,
        taxonomy: Taxonomy | None,
        keys: dict[str, list[Any]],
        *,
        root_threshold: int,
        ring: KeyRing,
        is_rehearsal: bool = False,
    ) -> str:
        """Make a repository, and return the digest of its first root, which everybody who trusts it writes down.

        Args:
            taxonomy: the first one that is published; None is an authority for policies, which has none.
            keys: public keys by top role.
            root_threshold: how many of the root's keys must sign who may sign what.
            ring: the private halves.
            is_rehearsal: all of its keys are made for show; its first root says so for good.

        Raises:
            ProvenanceError: there's one already, or a key is missing.
        """
        with self._locked():
            self.refuse_one()
            change = RepositoryChange(chain=None, ring=ring)
            root = change.root()
            for role, publics in keys.items():
                for key in publics:
                    root.add_key(key, role)
            root.roles["root"].threshold = root_threshold
            if is_rehearsal:
                root.unrecognized_fields[REHEARSAL] = True
            if taxonomy is None:
                root.unrecognized_fields[POLICIES] = True
                change.targets()
            else:
                publish_taxonomy(change, taxonomy)
            self._commit(change)
        return read_chain(self._read).first_root_sha256

    @contextmanager
    def change(self, ring: KeyRing) -> Iterator[RepositoryChange]:
        """Let a caller change roles; what it has changed is signed and published when it ends without an error.

        Raises:
            TooFewSignaturesError: keys are missing; nothing is published.
        """
        self._refuse_none()
        with self._locked():
            change = RepositoryChange(chain=self.chain(), ring=ring)
            yield change
            self._commit(change)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock", wait=True):
            self._end_change()
            yield

    def _end_change(self) -> None:
        """Put the rest of a new root's files in place, where somebody was killed over that."""
        path = self.folder / _CHANGE
        if not path.exists():
            return
        try:
            files = {
                name: base64.b64decode(text, validate=True) for name, text in json.loads(path.read_bytes()).items()
            }
            strange = [name for name in files if not is_repository_file(name)]
        except (ValueError, TypeError, AttributeError) as error:
            raise ProvenanceError(f"{path} isn't a change that was broken off: {error}. Remove it.") from error
        if strange:
            raise ProvenanceError(f"{path} names {strange[0]!r}, which is no file of a repository. Remove it.")
        self._put(files)

    def _put(self, files: Mapping[str, bytes]) -> None:
        """Put files in place, the timestamp last: until then everybody sees the state before."""
        last = metadata_file("timestamp", None)
        replace_files(self.folder, {name: data for name, data in files.items() if name != last})
        replace_files(self.folder, {name: data for name, data in files.items() if name == last})
        (self.folder / _CHANGE).unlink(missing_ok=True)

    def _commit(self, change: RepositoryChange) -> None:
        """Sign what was changed, then which versions belong together, and put the files in place, the newest last."""
        now, chain = self.clock(), change.chain
        old = chain.root if chain else None
        root = change.roles.get("root", old)
        delegator = change.roles.get("targets") or (chain.delegations if chain else None)
        snapshot = copy.deepcopy(chain.snapshot.signed) if chain else Snapshot(meta={})
        files = dict(change.target_files)
        for role in sorted(change.roles, key=lambda one: (one != "root", one != "targets", one)):
            signers = [old, root] if role == "root" else [root if role in TOP_ROLES else delegator]
            if role in change.signed:
                metadata = sign(change.signed[role], role, signers, change.ring)
            else:
                metadata = self._signed(role, change.roles[role], signers, change.ring, now)
            files[metadata_file(role, metadata.signed.version)] = metadata.to_bytes()
            if role != "root":
                snapshot.meta[f"{role}.json"] = MetaFile(metadata.signed.version)
        # A role that is delegated no more stays named: clients refuse a snapshot from which one has vanished.
        snapshot.version += chain is not None
        newest = self._signed("snapshot", snapshot, [root], change.ring, now)
        files[metadata_file("snapshot", snapshot.version)] = newest.to_bytes()
        version = chain.timestamp.signed.version + 1 if chain else 1
        timestamp = Timestamp(version, snapshot_meta=MetaFile(snapshot.version))
        files[metadata_file("timestamp", None)] = self._signed(
            "timestamp", timestamp, [root], change.ring, now
        ).to_bytes()
        if "root" in change.roles:
            # A root is seen at once, and may name other keys than those of the timestamp that is there.
            text = json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()})
            replace_files(self.folder, {_CHANGE: text.encode()})
        self._put(files)

    def _signed(self, role: str, signed: Any, delegators: list[Any], ring: KeyRing, now: datetime) -> Metadata[Any]:  # noqa: ANN401
        signed.expires = self.lifetimes.until(role, now)
        return sign(Metadata(signed), role, delegators, ring)


def sign(metadata: Metadata[Any], role: str, delegators: list[Root | Targets | None], ring: KeyRing) -> Metadata[Any]:
    """Add the signatures of all keys at hand that may sign a role.

    Args:
        metadata: of the role; signatures that it has stay.
        role: its name.
        delegators: who name the role's keys, each of whom must be satisfied; None is left out.
        ring: the keys at hand.

    Raises:
        TooFewSignaturesError: there are fewer signatures than one of them wants.
    """
    there = [one for one in delegators if one is not None]
    wanted = dict.fromkeys(keyid for one in there for keyid in one.get_delegated_role(role).keyids)
    for signer in ring.signers(keyid for keyid in wanted if keyid not in metadata.signatures):
        try:
            metadata.sign(signer, append=True)
        except UnsignedMetadataError as error:  # in which TUF wraps what a token says
            if isinstance(error.__cause__, ProvenanceError):
                raise error.__cause__ from error
            raise
    for one in there:
        found = one.get_verification_result(role, metadata.signed_bytes, metadata.signatures)
        if not found:
            have, need = len(found.signed), found.threshold
            absent = ", ".join(keyid[:12] for keyid in found.unsigned)
            msg = (
                f"{role!r} has {have} of {need} signatures. Still to sign, {need - have} of the keys {absent}: give "
                "the folders that they lie in with --keys."
            )
            raise TooFewSignaturesError(msg, role, metadata)
    return metadata


def publish_taxonomy(change: RepositoryChange, taxonomy: Taxonomy) -> None:
    """Let the authority sign a taxonomy: its name, version, classes and their meanings."""
    path = taxonomy_target(taxonomy.name, taxonomy.version)
    number = max(map(number_of, published(change.targets())), default=0) + 1
    change.add_target("targets", path, rfc8785.dumps(taxonomy.to_mapping()), **{NUMBER: number})
