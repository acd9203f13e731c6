"""An authority as who opens data sees it: fetched by a TUF client, trusted by the digest of its first root."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuf.api import exceptions as tuf
from tuf.api.metadata import TargetFile
from tuf.ngclient import Updater
from tuf.ngclient.fetcher import FetcherInterface

from cosmati.errors import MissingExtraError, ProvenanceError
from cosmati.provenance.authority.chain import Chain, checked, read_chain
from cosmati.provenance.authority.errors import (
    ExpiredMetadataError,
    InconsistentMetadataError,
    RolledBackError,
    TamperedManifestError,
    UnreachableAuthorityError,
    UnsignedMetadataError,
    UntrustedRootError,
)
from cosmati.provenance.authority.names import METADATA, SourceName, metadata_file, role_of, target_file
from cosmati.provenance.authority.taxonomies import read_taxonomies, refuse_other_class
from cosmati.provenance.known_time import KnownTime
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.provenance.voucher import Voucher
from cosmati.storage.atomic import replace_file
from cosmati.storage.lock import FileLock

_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 5_000_000
_CHUNK_BYTES = 1 << 16
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(sec|s|m|h|d)")
_SECONDS = {"sec": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _now() -> datetime:
    return datetime.now(UTC)


class Authority:
    """An authority whose signatures are trusted.

    What was seen of it before is kept, and when, so that an older state is refused later, and a clock that was set
    back makes nothing valid again.

    Args:
        url: of its repository: a folder, http(s)://, or any that fsspec knows.
        root: SHA-256 of its first root in hex, as `cosmati keys init` has said it. It comes from the authority itself,
            and not from where its repository lies.
        state: folder for what was seen; None is one below the user's cache.
        refresh: how often a run asks again what is signed: seconds, or a time string (`10m`, `600sec`, `1h`).
        run: folder of the run that the data are opened for. Where what it began with holds no longer, it can go on from
            what it has kept, as its policy's `grace` says; nothing else can.
        clock: says what time it is.

    Raises:
        ProvenanceError: `root` is no digest, or `refresh` no time.
    """

    def __init__(
        self,
        url: str | Path,
        root: str,
        *,
        state: str | Path | None = None,
        refresh: float | str = "10m",
        run: str | Path | None = None,
        clock: Callable[[], datetime] = _now,
    ) -> None:
        if not str(url):
            raise ProvenanceError("The authority's address is empty. Give its folder, or https://...")
        place = str(url).rstrip("/")
        self.url = place if "://" in place else str(Path(place).expanduser())
        self.root = str(root).removeprefix("sha256:")
        if not _HEX.fullmatch(self.root):
            msg = (
                f"{root!r} isn't a SHA-256 in hex. It's the digest of the authority's first root, which `cosmati keys "
                "init` has said and `cosmati keys status` says: ask the authority for it."
            )
            raise ProvenanceError(msg)
        self.refresh_seconds = _seconds(refresh)
        self.run = None if run is None else Path(run).expanduser().absolute()
        self.now = KnownTime(clock)
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "cosmati" / "authorities"
        self._state = Path(state) if state is not None else cache / self.root[:32]
        self._fetcher = fetcher_of(self.url)
        self._chain: Chain | None = None
        self._taxonomy: Taxonomy | None = None
        self._taxonomy_files: dict[str, bytes] = {}

    def refresh(self) -> Chain:
        """Fetch what is new, and return all of it, verified as of now.

        Raises:
            ProvenanceError: one of `cosmati.provenance.authority.errors`: each wrong has its own.
        """
        first = self._first_root()
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            with FileLock(self._state / ".lock", wait=True):  # all ranks of a machine share it
                self._note_time()
                Updater(str(self._state), f"{self.url}/{METADATA}", fetcher=self._fetcher, bootstrap=first).refresh()
                # The client has settled which state is the newest: that is read, and the classes along with it.
                self._chain = read_chain(self._settled, at=self.now(), root_sha256=self.root)
        except (tuf.RepositoryError, tuf.DownloadError) as error:
            raise _told(error, self.url) from error
        except OSError as error:
            msg = f"What was seen of {self.url} can't be kept in {self._state}: {error}. Name another folder: state=."
            raise ProvenanceError(msg) from error
        self._taxonomy = None
        self._taxonomy_files = {}
        return self._chain

    def _note_time(self) -> None:
        """Keep when the authority was asked last: nobody is asked as of an earlier time."""
        path = self._state / "asked"
        try:
            self.now.not_before(datetime.fromisoformat(path.read_text("utf-8")), str(path))
        except FileNotFoundError:
            pass
        except (ValueError, TypeError) as error:
            msg = f"{path} says no time: {error}. Remove it, if nobody has changed it to have an old state taken."
            raise ProvenanceError(msg) from error
        replace_file(path, self.now().isoformat(timespec="seconds").encode())

    def _settled(self, name: str) -> bytes | None:
        """Return metadata as the client keeps them; those of the classes, which it doesn't, from the repository."""
        file = name.removeprefix(f"{METADATA}/")
        role = file if file == "timestamp.json" else file.partition(".")[2]
        if role == "root.json":
            path = self._state / "root_history" / file
            return path.read_bytes() if path.exists() else None
        if role in {"timestamp.json", "snapshot.json", "targets.json"}:
            return (self._state / role).read_bytes()
        return self._read(name)

    @property
    def chain(self) -> Chain:
        """What was fetched last; fetches if nothing was."""
        return self._chain or self.refresh()

    @property
    def taxonomy(self) -> Taxonomy:
        """The taxonomy that the authority has published last."""
        if self._taxonomy is not None:
            return self._taxonomy  # asked for each source
        self._taxonomy = next(self.taxonomies())
        return self._taxonomy

    def taxonomies(self) -> Iterator[Taxonomy]:
        """Fetch all versions that the authority has published, the newest first."""
        return read_taxonomies(self.chain, self.target)

    def target(self, info: TargetFile) -> bytes:
        """Return a target's content.

        Raises:
            TamperedManifestError: its file is missing, or isn't what was signed.
        """
        name = target_file(info.path, info.hashes["sha256"])
        data = self._read(name)
        if data is None:
            raise TamperedManifestError(
                f"{info.path} was signed, and its file is missing in {self.url}. Fetch it again."
            )
        self._taxonomy_files[name] = checked(data, info)
        return data

    def vouch(self, manifest: bytes, *, class_path: str, source: str, version: str) -> Voucher:
        """Return that a source's manifest was signed, and by whom.

        Args:
            manifest: its bytes.
            class_path: class that it says; it's signed by the signers of that one, or by nobody.
            source: name that it says.
            version: of its content that it says.

        Raises:
            ProvenanceError: there's no such class, or none any more; nobody who may has signed the source, or another
                manifest of it.
        """
        taxonomy = self.taxonomy
        refuse_other_class(taxonomy, class_path, self.taxonomies)
        name = SourceName(taxonomy.name, class_path, source, version)
        role, signed = role_of(class_path), self.chain.source(name).hashes["sha256"]
        found = hashlib.sha256(manifest).hexdigest()
        if found != signed:
            msg = (
                f"The manifest of {source} {version} has the SHA-256 {found[:16]}, and {signed[:16]} was signed. "
                "Restore it, or have the source signed under a new version."
            )
            raise TamperedManifestError(msg)
        expires = self.chain.targets[role].signed.expires.isoformat()
        others = self.chain.other_versions(name)
        return Voucher(self.root, name.target, found, self.chain.signers(role), expires, others=others)

    def archive(self) -> dict[str, bytes]:
        """Return the files that bear out what was vouched for, by `ROOT/FILE`."""
        files = {**self.chain.files, **self._taxonomy_files}
        return {f"{self.root}/{name}": data for name, data in files.items()}

    def _first_root(self) -> bytes:
        data = self._read(metadata_file("root", 1))
        if data is None:
            msg = f"{self.url} holds no authority's repository: metadata/1.root.json is missing. Check the address."
            raise UnreachableAuthorityError(msg)
        if hashlib.sha256(data).hexdigest() != self.root:
            msg = (
                f"{self.url} is another authority's: its first root has the SHA-256 "
                f"{hashlib.sha256(data).hexdigest()}, and {self.root} is trusted. Check the address, or ask the "
                "authority."
            )
            raise UntrustedRootError(msg)
        return data

    def _read(self, name: str) -> bytes | None:
        try:
            data: bytes = self._fetcher.download_bytes(f"{self.url}/{name}", _MAX_BYTES)
        except tuf.DownloadHTTPError as error:
            if error.status_code in (403, 404):
                return None
            raise _told(error, self.url) from error
        except tuf.DownloadError as error:
            raise _told(error, self.url) from error
        return data


def _seconds(span: float | str) -> float:
    match = _SPAN.fullmatch(span.strip()) if isinstance(span, str) else None
    seconds = float(match[1]) * _SECONDS[match[2]] if match else span
    if not isinstance(seconds, int | float) or isinstance(span, bool) or not 0 < seconds < float("inf"):
        msg = f"refresh={span!r} is no time. Give seconds, or '10m' (minutes), '600sec', '1h'; 10 minutes are usual."
        raise ProvenanceError(msg)
    return float(seconds)


class FileFetcher(FetcherInterface):
    """Fetches from a folder, or from what fsspec opens; TUF's own clients know HTTP alone."""

    def _fetch(self, url: str) -> Iterator[bytes]:
        try:
            with _opened(url) as file:
                while data := file.read(_CHUNK_BYTES):
                    yield data
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise tuf.DownloadHTTPError(f"{url} isn't there", 404) from error
        except (OSError, ValueError) as error:  # a client takes its own errors alone
            raise tuf.DownloadError(f"{url}: {error}") from error


def fetcher_of(url: str) -> FetcherInterface:
    """Return what fetches from an address."""
    if url.startswith(("http://", "https://")):
        from tuf.ngclient.urllib3_fetcher import Urllib3Fetcher

        return Urllib3Fetcher()
    return FileFetcher()


def _opened(url: str) -> Any:  # noqa: ANN401  (an open file)
    if "://" not in url or url.startswith("file://"):
        return Path(url.removeprefix("file://")).open("rb")
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError(f"{url} needs fsspec: pip install 'cosmati[streaming]'.") from error
    return fsspec.open(url, "rb").open()


_ERRORS: tuple[tuple[type[Exception], type[ProvenanceError], str], ...] = (
    (
        tuf.ExpiredMetadataError,
        ExpiredMetadataError,
        "has expired: {}. Ask the authority to renew. If it says that it has, somebody shows you an old state.",
    ),
    (
        tuf.BadVersionNumberError,
        RolledBackError,
        "shows an older state than was seen here before: {}. Ask the authority why.",
    ),
    (
        tuf.UnsignedMetadataError,
        UnsignedMetadataError,
        "isn't signed by the keys that may: {}. Nothing in it is trusted.",
    ),
    (tuf.RepositoryError, InconsistentMetadataError, "can't be trusted: {}. Fetch it again, or ask the authority."),
)
"""A TUF client's errors, the narrower ones first, with ours and their mends."""


def _told(error: Exception, url: str) -> ProvenanceError:
    """Return a TUF client's error as ours, with its mend."""
    for theirs, ours, words in _ERRORS:
        if isinstance(error, theirs):
            return ours(f"{url} {words.format(error)}")
    if isinstance(error, tuf.DownloadHTTPError) and error.status_code in (403, 404):
        msg = f"{url} isn't whole: {error}. Other metadata name that file: ask the authority to restore it."
        return InconsistentMetadataError(msg)
    return UnreachableAuthorityError(
        f"{url} can't be fetched: {str(error) or type(error).__name__}. Check the address and the connection."
    )
