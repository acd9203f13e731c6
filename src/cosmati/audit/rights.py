"""What a bundle has of sealed columns: boxes for everybody, and for one holder a credential and keys to them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cosmati.errors import CosmatiError, ExportError, RefutedError
from cosmati.ledger.details import decode_details
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.released_keys import check_released, holder_of, read_holder_key, read_released
from cosmati.ledger.sealing import SEALED, SealedClasses, boxes_of
from cosmati.provenance.authority.credential import Credential, read_credential, signers_of
from cosmati.provenance.sensitive import marked_in, sensitive_classes
from cosmati.provenance.voucher import FOLDER

RIGHTS = "rights"
CREDENTIAL, KEYS = f"{RIGHTS}/credential.json", f"{RIGHTS}/keys.json"


def enclose_rights(folder: Path, ledger: VerifiedLedger, credential: Path, keys: Path) -> None:
    """Put a credential and the keys that were released under it into a bundle's folder.

    Raises:
        ExportError: the credential doesn't hold for this run, or the keys are another's.
    """
    (folder / RIGHTS).mkdir()
    try:
        shutil.copyfile(credential, folder / CREDENTIAL)
        shutil.copyfile(keys, folder / KEYS)
        _enclosed(folder, ledger)
    except (CosmatiError, OSError) as error:
        raise ExportError(f"{credential} can't be enclosed with {keys}: {error}") from error


def _enclosed(folder: Path, ledger: VerifiedLedger) -> Credential:
    facts = [tables.details.get("provenance") for tables in ledger.tables]
    chain = signers_of(ledger.directory / FOLDER, facts)
    found = read_credential((folder / CREDENTIAL).read_bytes(), chain, run=ledger.key.name, now=datetime.now(UTC))
    keys = (folder / KEYS).read_bytes()
    check_released(keys, run=found.run, credential=found.digest, holder=found.holder)
    return found


def check_rights(
    say: Callable[[str, str], None], folder: Path, ledger: VerifiedLedger, holder_key: Path | None
) -> Credential | None:
    """Say what is sealed in a bundle's ledger, and open what its credential lets the holder of a key read.

    Raises:
        RefutedError: its credential doesn't hold, its keys are others, or a box doesn't open.
    """
    credential = None
    try:
        if (folder / CREDENTIAL).is_file():
            credential = _enclosed(folder, ledger)
            names = f"{', '.join(credential.columns)} of {', '.join(credential.classes)}"
            say("credential", f"{names}, for the holder of {credential.holder[:16]}, until {credential.until}")
        if holder_key is not None:
            if credential is None:
                raise RefutedError("The bundle encloses no credential, so a holder's key opens nothing of it.")
            key = read_holder_key(holder_key.read_bytes())
            if holder_of(key) != credential.holder:
                raise RefutedError(f"The key {holder_key} isn't the one that the bundle's credential names.")
            data = (folder / KEYS).read_bytes()
            ledger.keys = read_released(
                data, key, run=ledger.key.name, credential=credential.digest, covers=credential.covers
            )
        _say_sealed(say, ledger)
        _say_open(say, ledger)
    except RefutedError:
        raise
    except (CosmatiError, OSError) as error:
        raise RefutedError(f"What the bundle has sealed doesn't hold: {error}") from error
    return credential


def _say_open(say: Callable[[str, str], None], ledger: VerifiedLedger) -> None:
    """Say which classes the data's authority called sensitive, and the run has in the open all the same."""
    said = set[str]()
    for tables in ledger.tables:
        archive = (tables.details.get("provenance") or {}).get("archive", {})
        files = {name: (ledger.directory / FOLDER / digest).read_bytes() for name, digest in archive.items()}
        told = {*tables.details.get(SEALED, {}).get("classes", ())}
        for name in sorted({*sensitive_classes(tables.classes, marked_in(files))} - told - said):
            said.add(name)
            since = f"from entry {tables.index} on"
            say(
                "but", f"the data's authority calls {name} sensitive, and {since} what is measured of it is in the open"
            )


def _say_sealed(say: Callable[[str, str], None], ledger: VerifiedLedger) -> None:
    found, stayed = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for item, entry, tables in ledger.steps():
        if item.details is None or not (boxes := boxes_of(details := decode_details(item.details))):
            continue
        classes = SealedClasses.of(tables.details, tables.classes, ledger.key.name)
        found.update((name, column) for name, column, _ in boxes)
        stayed.update(classes.open(details, entry.step, ledger.keys)[1])
    for (name, column), number in sorted(found.items()):
        left = stayed[name, column]
        opened = "" if left == number else f"; {number - left} opened with your key, each as it was written"
        say("sealed", f"{column} of {name} in {left} steps" + opened)
