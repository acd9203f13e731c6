"""The options under which sealed columns are read: a credential, the keys released under it, its holder's key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cosmati.errors import LedgerError, MissingExtraError
from cosmati.ledger.derived.opened import DerivedLedger
from cosmati.ledger.derived.opened_columns import open_columns
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.released_keys import holder_of, read_holder_key, read_released
from cosmati.ledger.sealing import ColumnKeys
from cosmati.ledger.tables import Tables
from cosmati.provenance.voucher import FOLDER

if TYPE_CHECKING:
    from cosmati.provenance.authority.chain import Chain
    from cosmati.provenance.authority.credential import Credential

CredentialFile = Annotated[
    Path | None, typer.Option("--credential", metavar="FILE", help="To read what is sealed: your credential.")
]
ReleasedKeys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="What the operator released: `cosmati ledger release`."),
]
HolderKey = Annotated[
    Path | None, typer.Option("--holder-key", metavar="FILE", help="The private key that the credential names.")
]
AuthorityPlace = Annotated[
    str,
    typer.Option("--authority", metavar="URL", help="Ask the data authority now; the ledger's archive if left out."),
]
AuthorityRoot = Annotated[
    str,
    typer.Option("--root", help="SHA-256 of the authority's first root; the ledger's if left out."),
]
_THREE_FILES = "What is sealed is read with three files: --credential, --keys and --holder-key. Give all of them."


@dataclass(frozen=True, slots=True)
class ReadingRights:
    """What was given on the command line to read sealed columns with.

    Attributes:
        credential: its file; None reads nothing that is sealed.
        keys: what was released under it.
        holder_key: the private key that it names.
        authority: where to ask the authority now; empty takes what the ledger has archived.
        root: of the authority; empty takes the one that the ledger names.
    """

    credential: Path | None = None
    keys: Path | None = None
    holder_key: Path | None = None
    authority: str = ""
    root: str = ""

    def open(self, directory: Path, run: str, read_with: Iterable[Tables]) -> ColumnKeys | None:
        """Return the keys of what may be read, after checking who says so; None where nothing was given.

        Args:
            directory: of the ledger.
            run: name of its log.
            read_with: its tables.

        Raises:
            LedgerError: a part is missing, or the keys are others. ProvenanceError: the credential doesn't hold.
        """
        if not self.any_given:
            return None
        read, found = self._opened(directory, run, read_with)
        names = f"{', '.join(read.columns)} of {', '.join(read.classes)}"
        typer.echo(f"Your credential covers {names}, until {read.until}.", err=True)
        return found

    @property
    def any_given(self) -> bool:
        """Whether somebody asks to read what is sealed."""
        return any((self.credential, self.keys, self.holder_key))

    def open_run(self, folder: Path) -> ColumnKeys | None:
        """Return the keys for one run of a store; None where the credential is for another.

        Args:
            folder: of the run.

        Raises:
            LedgerError, ProvenanceError: as for `open`.
        """
        if self.credential is None:
            raise LedgerError(_THREE_FILES)
        run = _run_named_in(self.credential)
        try:
            if read_verifier_key(folder / "ledger").name != run:
                return None
            ledger = VerifiedLedger(folder / "ledger")
        except LedgerError:  # Who reads the run says so.
            return None
        return self._opened(ledger.directory, ledger.key.name, ledger.tables)[1]

    def _opened(self, directory: Path, run: str, read_with: Iterable[Tables]) -> tuple[Credential, ColumnKeys]:
        if self.credential is None or self.keys is None or self.holder_key is None:
            raise LedgerError(_THREE_FILES)
        key = read_holder_key(_content_of(self.holder_key))
        read = checked_credential(
            self.credential, run, chain_of(directory, read_with, self.authority, self.root), holder_of(key)
        )
        covered = read_released(_content_of(self.keys), key, run=run, credential=read.digest, covers=read.covers)
        return read, covered

    def open_tables(self, derived: DerivedLedger) -> None:
        """Let derived tables hold what may be read, in memory.

        Raises:
            LedgerError, ProvenanceError: as for `open`.
        """
        if (keys := self.open(derived.ledger, derived.index.origin, derived.tables)) is not None:
            open_columns(derived, keys)


def _content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}. Give the file that you were sent.") from error


def _run_named_in(credential: Path) -> str:
    """Return the run that a credential is for, as it says."""
    try:
        from cosmati.provenance.authority.credential import run_named_in
    except ImportError as error:
        raise _missing(error) from error
    return run_named_in(_content_of(credential))


def _missing(error: ImportError) -> MissingExtraError:
    return MissingExtraError(f"Credentials need another package ({error.name}): pip install 'cosmati[authority]'.")


NO_RIGHTS = ReadingRights()


def checked_credential(path: Path, run: str, chain: Chain, holder: str | None = None) -> Credential:
    """Return a credential that holds now.

    Raises:
        ProvenanceError: it doesn't (see `cosmati.provenance.authority.credential.read_credential`).
    """
    from cosmati.provenance.authority.credential import read_credential

    return read_credential(_content_of(path), chain, run=run, now=datetime.now(UTC), holder=holder)


def chain_of(directory: Path, read_with: Iterable[Tables], authority: str = "", root: str = "") -> Chain:
    """Return who may sign what: as the authority says now, or as the ledger has archived it.

    Raises:
        ProvenanceError: the ledger names no authority, or others than is asked; or it can't be trusted.
    """
    try:
        from cosmati.provenance.authority.credential import signers_of
    except ImportError as error:
        raise _missing(error) from error
    facts = [tables.details.get("provenance") for tables in read_with]
    return signers_of(directory / FOLDER, facts, authority=authority, root=root)


def opened_ledger(ledger: VerifiedLedger, rights: ReadingRights) -> VerifiedLedger:
    """Return a ledger with what may be read of it open."""
    ledger.keys = rights.open(ledger.directory, ledger.key.name, ledger.tables)
    return ledger
