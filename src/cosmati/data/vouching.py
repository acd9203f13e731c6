"""Signed data: a source is what its manifest says, and the manifest is what its class's signers have signed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from cosmati.data.shards.index import ShardIndex, ShardInfo
from cosmati.data.shards.manifest import SourceManifest, packed_as_json
from cosmati.data.shards.remote import EnvironmentFaultError
from cosmati.errors import DataError, ProvenanceError
from cosmati.provenance.authority.errors import reason_of
from cosmati.provenance.kept_vouchers import kept_vouchers
from cosmati.provenance.known_time import KnownTime
from cosmati.provenance.voucher import LostVoucher, Reason, VouchedData, Voucher, together


class LicenceExpiredError(DataError):
    """The licence of a source holds no longer."""


class TamperedIndexError(DataError):
    """An index isn't the one that goes with a signed manifest."""


class TamperedShardError(EnvironmentFaultError):
    """A shard isn't what a signed manifest says: no row of it is left out as a bad one, since none may be read."""


class Vouches(Protocol):
    """Who vouches for sources: an `Authority`.

    Attributes:
        root: SHA-256 of its first root, in hex.
        refresh_seconds: how often a run asks again.
        run: folder of the run that the sources are opened for, which may go on from what it has kept.
        now: says what time it is, and never an earlier one than is known of.
    """

    root: str
    refresh_seconds: float
    run: Path | None
    now: KnownTime

    def refresh(self) -> object:
        """Ask anew what is signed now: once for all sources that are opened together."""
        ...

    def vouch(self, manifest: bytes, *, class_path: str, source: str, version: str) -> Voucher:
        """Return that a source's manifest was signed; raise a `ProvenanceError` where nobody has who may."""
        ...

    def archive(self) -> Mapping[str, bytes]:
        """Return the files that bear that out."""
        ...


_MAX_AROUND = 8
Sizes = Callable[[Sequence[str]], Mapping[str, int | None] | None]


@dataclass(frozen=True)
class VouchedShards:
    """A source that is vouched for, and its shards.

    Attributes:
        manifest: as it was signed.
        voucher: that it was.
        opened: when that was found, ISO 8601.
        archive: what bears it out.
        url: of the source, for messages.
        asked: who vouches, to be asked again; it stays in the process that has opened the source.
        lost: why it holds no longer; a run that is resumed has then been given what it has `kept`.
        kept: all that the run had kept, where that was needed.
    """

    manifest: SourceManifest
    voucher: Voucher
    opened: str
    archive: Mapping[str, bytes]
    url: str = ""
    asked: AskedAuthority | None = field(default=None, repr=False, compare=False)
    lost: tuple[LostVoucher, ...] = ()
    kept: tuple[VouchedData, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out who is asked, whose connections and locks belong to one process, and what they have said."""
        return {**self.__dict__, "asked": None, "archive": {}, "kept": ()}

    def again(self) -> VouchedData:
        """Return what holds of it, or what doesn't, as they have said it when they were asked last; nothing raises."""
        assert self.asked is not None, "asked in the process that has opened it"
        found = list[Voucher]()
        wrongs = list(self.asked.wrongs(self.url, self.manifest, found))
        return VouchedData(
            self.asked.authority.now().isoformat(timespec="seconds"),
            () if wrongs else (replace(found[0], index_sha256=self.voucher.index_sha256),),
            self.asked.archive(self.manifest),
            lost=tuple(self.asked.lost(self.voucher.target, error) for error in wrongs),
        )

    def check_shard(self, number: int, path: Path, info: ShardInfo) -> os.stat_result:
        """Read a shard's file whole, and compare it with what was signed; return which file that was.

        Args:
            number: of the shard.
            path: of its file.
            info: how the index, which nobody has signed, says that it's read.

        Raises:
            TamperedShardError: it's another, or the index gives it other columns than it has.
        """
        wanted = self.manifest.shards[number]
        with path.open("rb") as file:
            found, status = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno())
            file.seek(0)
            columns = _columns(file.read) if found == wanted.sha256 else None
        if found != wanted.sha256:
            msg = (
                f"{path} isn't the shard {wanted.name} that was signed: its SHA-256 is {found[:16]}, and "
                f"{wanted.sha256[:16]} was signed. Fetch it again, or have the source signed anew."
            )
            raise TamperedShardError(msg)
        if columns != [[column.name, column.encoding, column.size] for column in info.columns]:
            told = ", ".join(f"{column.name} ({column.encoding})" for column in info.columns)
            msg = (
                f"The index of {path} gives it the columns {told}, and others were signed with its rows. Restore "
                "index.json."
            )
            raise TamperedShardError(msg)
        return status


def _columns(read: Callable[[int], bytes]) -> list[list[object]] | None:
    """Return name, encoding and bytes of each column, as an MDS shard's own header says; None where it says nothing."""
    num_rows = int.from_bytes(read(4), "little")
    offsets = read(4 * (num_rows + 1))
    start = 4 + len(offsets)
    try:
        head = json.loads(read(max(0, int.from_bytes(offsets[:4], "little") - start)))
        named = zip(head["column_names"], head["column_encodings"], head["column_sizes"], strict=True)
        return [list(one) for one in named]
    except (ValueError, KeyError, TypeError):
        return None


class AskedAuthority:
    """An authority that was asked once for all sources that are opened together.

    Args:
        authority: it; where it can't be asked, a run that is resumed goes by what it has kept.
        is_fresh: it was asked just now.

    Raises:
        ProvenanceError: it can't be asked, and nothing was kept.
    """

    def __init__(self, authority: Vouches, *, is_fresh: bool = False) -> None:
        self.authority = authority
        self._was_reached = is_fresh
        self.failed: ProvenanceError | None = None
        if not is_fresh:
            self.refresh()
        if self.failed is not None and authority.run is None:
            raise self.failed

    def refresh(self) -> None:
        """Ask anew; that it failed is then told of each source."""
        self.failed = None
        try:
            self.authority.refresh()
            self._was_reached = True
        except ProvenanceError as error:
            self.failed = error

    def wrongs(self, url: str, manifest: SourceManifest, found: list[Voucher]) -> Iterator[Exception]:
        """Yield why the authority doesn't vouch for a source now, and append the voucher where it does."""
        names = {"class_path": manifest.class_path, "source": manifest.source, "version": manifest.source_version}
        try:
            if self.failed is not None:
                raise self.failed
            found.append(self.authority.vouch(manifest.to_bytes(), **names))
        except ProvenanceError as error:
            yield error
        until = manifest.facts.licence_valid_until
        if until and date.fromisoformat(until) < self.authority.now().date():
            msg = (
                f"The licence of {url} ({manifest.facts.licence or 'not named'}) was valid until {until}. Leave the "
                "source out, or have it signed with the new licence."
            )
            yield LicenceExpiredError(msg)

    def lost(self, target: str, error: Exception) -> LostVoucher:
        """Return what a wrong means for a source."""
        is_licence = isinstance(error, LicenceExpiredError)
        reason: Reason = "licence" if is_licence else reason_of(error, was_asked=error is not self.failed)
        because = f"{error} {self.authority.now.said}".rstrip() if reason != "revocation" else str(error)
        return LostVoucher(target, reason, because, self.authority.root)

    def archive(self, manifest: SourceManifest) -> dict[str, bytes]:
        """Return what bears out what was found last: nothing of an authority that was never reached."""
        own = {} if self.failed is not None and not self._was_reached else self.authority.archive()
        return {**own, f"manifests/{manifest.digest}.json": manifest.to_bytes()}


def asked_for(
    urls: Sequence[str | Path], authority: Vouches | Mapping[str, Vouches] | Mapping[Path, Vouches] | None
) -> list[AskedAuthority | None]:
    """Return who was asked about each of some data sets; each authority is asked once, and now.

    What one has signed when it was asked last may be revoked by now.

    Args:
        urls: of the data sets.
        authority: who vouches for all of them, or for each by its address; None where nobody does.

    Raises:
        ProvenanceError: an authority can't be asked, a data set has none, or one is named for no data set.
    """
    if not isinstance(authority, Mapping):
        asked = AskedAuthority(authority) if authority is not None else None
        return [asked] * len(urls)
    own = {_place(url): one for url, one in authority.items()}
    places = [_place(url) for url in urls]
    if unlike := sorted({*places} ^ {url for url, one in own.items() if one is not None}):
        what = "has no authority" if unlike[0] in places else "isn't among the data"
        msg = f"{unlike[0]} {what}. Name who vouches for each of the data: authority={{URL: Authority(...), ...}}."
        raise ProvenanceError(msg)
    everyone = {id(one): AskedAuthority(one) for one in dict.fromkeys(own.values())}
    return [everyone[id(own[place])] for place in places]


def _place(url: str | Path) -> str:
    return str(url).rstrip("/")


def vouched_shards(authority: AskedAuthority, url: str, data: bytes, index: object, sizes: Sizes) -> VouchedShards:
    """Return a source that an authority vouches for; nothing of it is read but small files.

    Args:
        authority: who vouches.
        url: of the source, for messages.
        data: its manifest as it lies there.
        index: of its shards.
        sizes: of the shards' files where they lie, by their names, without those that aren't there; returns None where
            nobody can say, and so of a single file.

    Raises:
        ProvenanceError: nobody who may has signed the manifest.
        LicenceExpiredError: its licence has ended.
        TamperedIndexError: the index lists other shards than the manifest.
        TamperedShardError: a shard is missing, or is of another size.
    """
    manifest = SourceManifest.from_bytes(data, name=f"{url}/manifest.json")
    vouched = vouched_manifest(authority, url, manifest)
    if not isinstance(index, ShardIndex):
        msg = f"{url} holds Parquet, whose files no manifest lists. Convert it to MDS to have it vouched for."
        raise TamperedIndexError(msg)
    _check_index(url, manifest, index, sizes)
    return replace(vouched, voucher=replace(vouched.voucher, index_sha256=index.digest))


def vouched_manifest(asked: AskedAuthority, url: str, manifest: SourceManifest) -> VouchedShards:
    """Return that a source is vouched for now, or was when the run that is resumed has begun.

    Raises:
        ProvenanceError: nobody who may has signed the manifest.
        LicenceExpiredError: its licence has ended.
    """
    opened, found = asked.authority.now().isoformat(timespec="seconds"), list[Voucher]()
    wrongs = list(asked.wrongs(url, manifest, found))
    if not wrongs:
        return VouchedShards(manifest, found[0], opened, asked.archive(manifest), url, asked)
    run = asked.authority.run
    whose = asked.authority.root, manifest.digest
    for kept in kept_vouchers(run) if run is not None else ():
        before = [one for data in kept for one in data.vouchers if (one.root, one.manifest_sha256) == whose]
        if before:
            lost = tuple(asked.lost(before[-1].target, error) for error in wrongs)
            return VouchedShards(manifest, before[-1], opened, kept[-1].archive, url, asked, lost, kept)
    raise wrongs[0]


def vouched_sources(data: object) -> list[VouchedShards]:
    """Return the sources of a data set, a source or a loader that are vouched for."""
    around = 0  # what is put around a data set: a DataLoader, say
    while not hasattr(data, "sources") and hasattr(data, "dataset") and around < _MAX_AROUND:
        data, around = data.dataset, around + 1
    sources = getattr(data, "sources", ())  # the user's own data may call anything so
    found = [getattr(source, "vouched", None) for source in sources] if isinstance(sources, list | tuple) else []
    return [one for one in found if isinstance(one, VouchedShards)]


def vouched_data(sources: Sequence[VouchedShards]) -> VouchedData | None:
    """Return what a run keeps of those who vouched for its sources; None where nobody did."""
    if not sources:
        return None
    found = together([VouchedData(one.opened, (one.voucher,), one.archive, lost=one.lost) for one in sources])
    kept = next((source.kept for source in sources if source.kept), ())
    return replace(kept[-1], lost=found.lost) if kept else found  # what the ledger says of them stands


def _check_index(url: str, manifest: SourceManifest, index: ShardIndex, sizes: Sizes) -> None:
    own = index.extra.get("cosmati")
    says = own if isinstance(own, dict) else {}
    wanted = {"class": manifest.class_path, "band": manifest.band, "grades": manifest.grades}
    wanted |= {"also": list(manifest.also), "packed": packed_as_json(manifest.packed)}
    usual: dict[str, object] = {"band": 0, "grades": {}, "also": [], "packed": []}
    for name, value in wanted.items():
        if says.get(name, usual.get(name)) != value:
            msg = f"{url}/index.json says {name} {says.get(name)!r}, and {value!r} was signed. Restore it."
            raise TamperedIndexError(msg)
    if index.num_shards != len(manifest.shards):
        msg = f"{url}/index.json lists {index.num_shards} shards, and {len(manifest.shards)} were signed. Restore it."
        raise TamperedIndexError(msg)
    files = []
    for number, shard in enumerate(manifest.shards):
        info = index.shard(number)
        if info.format != "mds":
            # Its rows would be cut by a file of offsets that nobody has signed.
            msg = f"{url}/index.json says that shard {number} is {info.format}, and only MDS is signed. Restore it."
            raise TamperedIndexError(msg)
        if (info.raw.basename, info.num_rows) != (shard.name, shard.rows):
            msg = (
                f"{url}/index.json lists {info.raw.basename} with {info.num_rows} rows as shard {number}, and "
                f"{shard.name} with {shard.rows} was signed. Restore it."
            )
            raise TamperedIndexError(msg)
        files.append(info.zip or info.raw)
    there = sizes([file.basename for file in files])
    if there is None:
        return
    for file in files:
        size = there.get(file.basename, -1)
        if size not in (None, file.num_bytes):
            what = "is missing" if size == -1 else f"has {size:,} bytes in place of {file.num_bytes:,}"
            raise TamperedShardError(f"{url}/{file.basename} {what}. Fetch the source again.")


class CheckedOnce:
    """Which shards of a source this process has compared with what was signed."""

    def __init__(self, vouched: VouchedShards) -> None:
        self._vouched = vouched
        self._checked: dict[int, tuple[int, ...]] = {}

    def check(self, number: int, path: Path, info: ShardInfo) -> None:
        """Compare a shard before its first row is read, and again where another file has taken its place."""
        if self._checked.get(number) != _identity(path.stat()):
            self._checked[number] = _identity(self._vouched.check_shard(number, path, info))

    def is_same(self, number: int, mapped: os.stat_result) -> bool:
        """Return whether the file that was mapped is the one that was compared, and no other that came in between."""
        return self._checked.get(number) == _identity(mapped)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
