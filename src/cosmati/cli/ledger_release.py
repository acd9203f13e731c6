"""`cosmati ledger release`: the operator hands out the keys of what a credential covers, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.column_keys import AuthorityRoot, chain_of, checked_credential
from cosmati.cli.ledger_folder import Folder, Key, ledger_of
from cosmati.cli.replay_asked import parse_steps
from cosmati.errors import LedgerError
from cosmati.ledger.details import decode_details
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.released_keys import blocks_in, release
from cosmati.ledger.sealing import KEY_FILE, SEALED, OperatorKeys, SealedClasses
from cosmati.storage.atomic import replace_file


def release_keys(
    folder: Folder,
    credential: Annotated[Path, typer.Option(metavar="FILE", help="Whose holder asks.")],
    authority: Annotated[
        str, typer.Option(metavar="URL", help="The data authority's repository: it's asked now who may still sign.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the keys.")],
    root: AuthorityRoot = "",
    steps: Annotated[
        str, typer.Option(metavar="FIRST:END", help="Of which steps, in whole blocks of 1024; `:` is all.")
    ] = ":",
    secret: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's private/columns.key; RUN's if left out.")
    ] = None,
    vkey: Key = None,
) -> None:
    """Release the keys of sealed columns to the holder of a credential: those that it covers, sealed to their key.

    Keys are of blocks of steps: who asks for one step is given its block. What was released can't be taken back, and
    steps that are logged later in a block are opened by its key, too.

    \b
    Example:
      cosmati ledger release RUN --credential ada.credential --authority authority --out ada.keys
    """  # noqa: D301
    directory = ledger_of(folder)
    ledger = VerifiedLedger(directory, vkey)
    path = secret or directory.parent / "private" / KEY_FILE
    if not path.exists():
        raise LedgerError(f"There's no {path}: nothing is sealed, or you aren't the operator. Give --secret FILE.")
    keys = OperatorKeys(path.read_bytes(), ledger.key.name)
    told = [tables.details.get(SEALED, {}).get("key") for tables in ledger.tables]
    if keys.commitment.hex() not in told:
        raise LedgerError(f"{path} isn't the secret that this ledger's columns are sealed with. Give the run's own.")
    read = checked_credential(credential, ledger.key.name, chain_of(directory, ledger.tables, authority, root))
    first, end = parse_steps(steps, len(ledger.standing))
    sealed = (
        (
            entry.step,
            decode_details(item.details),
            SealedClasses.of(tables.details, tables.classes, ledger.key.name),
        )
        for item, entry, tables in ledger.steps()
        if item.details is not None and first <= entry.step < end
    )
    blocks = blocks_in(sealed)
    replace_file(out, release(keys, blocks, read.covers, holder=read.holder, credential=read.digest))
    covered = [name for name, column, _ in sorted(blocks) if read.covers(name, column)]
    names = ", ".join(dict.fromkeys(covered))
    typer.echo(f"{out}: {len(covered)} keys, for {names}, readable by the holder of {read.holder[:16]} alone")
    typer.echo(f"  until     {read.until}, which tools heed and copies don't")
