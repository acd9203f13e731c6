"""`cosmati keys holder` and `cosmati keys credential`: who may read what a run has sealed."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from cosmati.errors import ProvenanceError
from cosmati.ledger.released_keys import create_holder_key
from cosmati.ledger.sealing import COLUMNS
from cosmati.storage.atomic import create_secret, replace_file

HOLDER, HOLDER_PUBLIC = ".holder.key", ".holder.pub"


def holder(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is called: a person, or an office.")],
    keys: Annotated[Path, typer.Option("--keys", help="The folder that it's written into.")] = Path("keys"),
) -> None:
    """Make the key that what is released under a credential is sealed to. It signs nothing; keep its private half.

    \b
    Example:
      cosmati keys holder auditor --keys ~/keys
    """  # noqa: D301
    private, public = keys / f"{name}{HOLDER}", keys / f"{name}{HOLDER_PUBLIC}"
    pem, told = create_holder_key()
    try:
        keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        create_secret(private, pem)
        replace_file(public, f"{told}\n".encode())
    except OSError as error:
        msg = f"The key {private} can't be created: {error.strerror}. Name a new one in a folder that you may write."
        raise ProvenanceError(msg) from error
    typer.echo(f"{public}  {told[:16]}")


def credential(
    authority: Annotated[Path, typer.Argument(metavar="AUTHORITY", help="The folder of the authority's repository.")],
    to: Annotated[str, typer.Option("--holder", metavar="PUB", help="The holder's NAME.holder.pub, or what is in it.")],
    run: Annotated[str, typer.Option(metavar="ORIGIN", help="Name of the run's log: the `origin` of `ledger verify`.")],
    classes: Annotated[list[str], typer.Option(metavar="CLASS", help="Which they may read; again for more.")],
    until: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="The last day on which it's valid, in UTC.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")],
    columns: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help=f"Which; all of {', '.join(COLUMNS)} if left out.")
    ] = None,
    keys: Annotated[
        list[Path] | None,
        typer.Option("--keys", help="A folder of private keys; again for more. AUTHORITY-keys if left out."),
    ] = None,
) -> None:
    """Let somebody read what a run has sealed of some classes. Those sign who sign the classes' data.

    Where several have to, the next one runs the same command on the same file. It opens nothing by itself: the operator
    releases the keys to its holder (`cosmati ledger release`).

    \b
    Example:
      cosmati keys credential authority --holder ada.holder.pub --run cosmati/one --classes customer/pii \\
        --until 2027-06-30 --out ada.credential --keys ~/keys
    """  # noqa: D301
    from cosmati.cli.keys import ring_of
    from cosmati.provenance.authority.credential import Credential, lacking, sign_credential
    from cosmati.provenance.authority.repository import AuthorityRepository

    if unknown := sorted({*(columns or ())} - {*COLUMNS}):
        raise ProvenanceError(f"No column {', '.join(unknown)} is ever sealed. There are {', '.join(COLUMNS)}.")
    chain = AuthorityRepository(authority).chain()
    chain.check_kind(policies=False)
    granted = Credential(
        authority=chain.first_root_sha256,
        holder=Path(to).read_text("ascii", "replace").strip() if Path(to).is_file() else to,
        run=run,
        classes=tuple(dict.fromkeys(classes)),
        columns=tuple(dict.fromkeys(columns or COLUMNS)),
        until=until.date(),
    )
    data = sign_credential(granted, chain, ring_of(authority, keys), out.read_bytes() if out.exists() else None)
    replace_file(out, data)
    typer.echo(f"{out}: for {', '.join(granted.classes)} of {run}, valid until {granted.until}")
    for name, number in lacking(data, chain).items():
        typer.echo(f"  but       signatures for {name} that are still lacking: {number}; they run the same command")
