"""`cosmati keys`: an authority, its people and what they may sign."""

from __future__ import annotations

import getpass
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cosmati.cli.keys_credential import credential, holder
from cosmati.cli.taxonomy_file import read_taxonomy
from cosmati.errors import MissingExtraError, ProvenanceError
from cosmati.provenance.taxonomy import Taxonomy, software_licences

try:
    from cosmati.cli.keys_status import as_mapping, show_standing
    from cosmati.provenance.authority import ceremony
    from cosmati.provenance.authority.keys import (
        PUBLIC,
        KeyRing,
        create_key,
        create_token_key,
        public_names,
        read_public_key,
    )
    from cosmati.provenance.authority.repository import AuthorityRepository
    from cosmati.provenance.authority.standing import standing
    from cosmati.provenance.authority.tokens import TokenKey
except ImportError as _error:  # told when a command is asked for
    _MISSING: ImportError | None = _error
else:
    _MISSING = None

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Who may sign which class of data: make an authority, name its people, take keys back.\n\n"
    "A ceremony in five commands: keys init, keys new, keys delegate, data sign, keys status.",
)
AuthorityFolder = Annotated[Path, typer.Argument(metavar="AUTHORITY", help="The folder of the authority's repository.")]
Keys = Annotated[
    list[Path] | None,
    typer.Option("--keys", help="A folder of private keys; again for more. AUTHORITY-keys if left out."),
]


app.command()(holder)
app.command()(credential)


@app.callback()
def need_packages() -> None:
    """Refuse to go on without the packages of the extra `authority`.

    Raises:
        MissingExtraError: one is missing.
    """
    if _MISSING is not None:
        msg = f"Authorities need another package ({_MISSING.name}): pip install 'cosmati[authority]'."
        raise MissingExtraError(msg)


@app.command()
def init(
    authority: AuthorityFolder,
    keys: Annotated[Path | None, typer.Option("--keys", help="Where the private keys go; AUTHORITY-keys.")] = None,
    taxonomy: Annotated[
        Path | None,
        typer.Option(help="YAML or JSON: name, version, classes, sensitive. Software licences if left out."),
    ] = None,
    policies: Annotated[
        bool, typer.Option("--policies", help="An authority for policies, which signs no data.")
    ] = False,
) -> None:
    """Make an authority: keys, taxonomy and an empty repository, which is plain files to be published anywhere.

    Its root has three keys, of which two must sign. They belong to three people: move each to its owner, offline.
    A passphrase is taken from COSMATI_PASSPHRASE.

    \b
    Examples:
      cosmati keys init authority
      cosmati keys init policies --policies
    """  # noqa: D301
    folder = keys or _beside(authority)
    if policies and taxonomy is not None:
        raise ProvenanceError("An authority for policies has no classes of its own. Leave out --taxonomy.")
    classes = None if policies else _classes(taxonomy)
    root = ceremony.init(authority, folder, classes, passphrase=_passphrase())
    typer.echo(f"{authority} is an authority now. Who trusts it writes down the digest of its root:\n  {root}")
    what = "main" if policies else "CLASS"
    typer.echo(
        f"Its keys are in {folder}. Move root-1, root-2 and root-3 to three people; targets, snapshot and timestamp "
        "sign from day to day.\n"
        f"Next: cosmati keys new NAME --keys DIR, then cosmati keys delegate {authority} {what} --to DIR/NAME{PUBLIC}"
    )


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is called: a person, or a role.")],
    keys: Annotated[Path, typer.Option("--keys", help="The folder that it's written into.")] = Path("keys"),
    pkcs11: Annotated[
        Path | None, typer.Option(help="A token's PKCS#11 library: the key is made on the token, and stays there.")
    ] = None,
    token: Annotated[str, typer.Option(help="The token's label, where the library knows more than one.")] = "",
    number: Annotated[
        int | None, typer.Option("--id", min=1, help="Take the key with this id, which is there already.")
    ] = None,
) -> None:
    """Make a key of one's own. Its public half goes to the authority, the other one nowhere.

    With --pkcs11 the file in --keys names the token, and holds no secret. The token's PIN is taken from COSMATI_PIN, or
    asked for.

    \b
    Examples:
      cosmati keys new ada --keys ~/keys
      cosmati keys new ada --keys ~/keys --pkcs11 /usr/lib/softhsm/libsofthsm2.so --token bank
      cosmati keys new ada --keys ~/keys --pkcs11 /usr/lib/libykcs11.so --id 2
    """  # noqa: D301
    if pkcs11 is None and (token or number):
        raise ProvenanceError("--token and --id are of a key on a token. Name its library, too: --pkcs11.")
    if pkcs11 is None:
        key = create_key(keys, name, passphrase=_passphrase())
    else:
        key = create_token_key(keys, name, TokenKey(str(pkcs11), token, number or 0), _ask_pin)
    typer.echo(f"{keys / name}{PUBLIC}  {key.keyid[:12]}")


@app.command()
def delegate(
    authority: AuthorityFolder,
    path: Annotated[
        str, typer.Argument(metavar="CLASS", help="A class, a branch for all classes below it, or a policy's name.")
    ],
    to: Annotated[list[Path], typer.Option("--to", help="Somebody's public key; again for more.")],
    threshold: Annotated[int, typer.Option(help="How many of them must sign.")] = 1,
    keys: Keys = None,
) -> None:
    """Let people sign the sources of a class, or the versions of a policy, in place of those who may now.

    \b
    Examples:
      cosmati keys delegate authority open/permissive --to ada.pub.pem
      cosmati keys delegate authority licensed --to ada.pub.pem --to bob.pub.pem --threshold 2
      cosmati keys delegate policies main --to ada.pub.pem --to bob.pub.pem --threshold 2
    """  # noqa: D301
    repository, ring = AuthorityRepository(authority), ring_of(authority, keys)
    publics = [read_public_key(one) for one in to]
    with repository.change(ring) as change:
        chain = repository.chain()
        if chain.holds_policies:
            names = [ceremony.delegate_policy(change, path, publics, threshold=threshold)]
        else:
            names = ceremony.delegate(
                change, ceremony.taxonomy_of(repository, chain), path, publics, threshold=threshold
            )
    for name in names:
        typer.echo(f"{name:<28} {threshold} of {', '.join(key.keyid[:12] for key in publics)}")


@app.command()
def publish(
    authority: AuthorityFolder,
    taxonomy: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON: name, version, classes.")],
    withdraw: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="It lacks this class, as is meant; again for more."),
    ] = None,
    reword: Annotated[
        list[str] | None, typer.Option(metavar="CLASS", help="It has other words for this class; again for more.")
    ] = None,
    keys: Keys = None,
) -> None:
    """Publish a new version of the taxonomy.

    What was signed of a class that stays is vouched for as before. A class that goes, or gets another meaning, has to
    be named: nobody opens data of a withdrawn class with this authority any more. A move is both: withdrawn and added.

    \b
    Examples:
      cosmati keys publish authority classes-2.yaml
      cosmati keys publish authority classes-3.yaml --withdraw customer/pii
    """  # noqa: D301
    repository, new = AuthorityRepository(authority), _classes(taxonomy)
    with repository.change(ring_of(authority, keys)) as change:
        chain = repository.chain()
        before = ceremony.taxonomy_of(repository, chain)
        found = ceremony.publish(change, before, new, withdraw=withdraw or (), reword=reword or ())
    typer.echo(f"{new.name} {new.version} is published, in place of {before.version}.")
    for name in found.added:
        typer.echo(f"  added      {name}: nobody signs it before `cosmati keys delegate`")
    for name in found.withdrawn:
        to = f"; it has moved to {found.moved[name]}, to be written and signed anew" if name in found.moved else ""
        num = ceremony.num_signed(chain, name)
        typer.echo(f"  withdrawn  {name}: signed sources, not vouched for any more: {num}{to}")
    for name in found.reworded:
        typer.echo(f"  reworded   {name}: signed sources, which stay so: {ceremony.num_signed(chain, name)}")


@app.command()
def rotate(
    authority: AuthorityFolder,
    old: Annotated[
        str, typer.Argument(metavar="KEY", help="The key that goes: its id's beginning, or its public file.")
    ],
    to: Annotated[Path, typer.Option("--to", help="The public key that takes its place.")],
    keys: Keys = None,
) -> None:
    """Put a new key in the place of one, wherever that may sign.

    \b
    Example:
      cosmati keys rotate authority ada.pub.pem --to ada-2027.pub.pem
    """  # noqa: D301
    _replace(authority, old, to, keys)


@app.command()
def revoke(
    authority: AuthorityFolder,
    old: Annotated[
        str, typer.Argument(metavar="KEY", help="The key that goes: its id's beginning, or its public file.")
    ],
    keys: Keys = None,
) -> None:
    """Take a key back: what only it has signed isn't trusted any more.

    \b
    Example:
      cosmati keys revoke authority 3b2748573081
    """  # noqa: D301
    _replace(authority, old, None, keys)


@app.command()
def renew(
    authority: AuthorityFolder,
    classes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CLASS]...", help="What to sign anew, too: sources of a class; `targets`, `root`."),
    ] = None,
    keys: Keys = None,
) -> None:
    """Sign anew what expires: the timestamp every week, by a timer; the rest once a year, with its own people's keys.

    \b
    Examples:
      cosmati keys renew authority
      cosmati keys renew authority root targets --keys authority-keys --keys ~/root-1 --keys ~/root-2
      cosmati keys renew authority open/permissive --keys authority-keys --keys ~/keys
    """  # noqa: D301
    repository = AuthorityRepository(authority)
    with repository.change(ring_of(authority, keys)) as change:
        ceremony.renew(change, classes or ())
    _show(repository, keys)


@app.command()
def status(
    authority: AuthorityFolder,
    keys: Annotated[
        list[Path] | None,
        typer.Option("--keys", help="A folder of keys, for their names; again for more. Public halves do."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show who may sign what, until when, and what expires next.

    \b
    Examples:
      cosmati keys status authority
      cosmati keys status authority --keys people --json
    """  # noqa: D301
    repository = AuthorityRepository(authority)
    if as_json:
        names = public_names([_beside(authority), *(keys or ())])
        typer.echo(json.dumps(as_mapping(standing(repository), names), indent=2))
    else:
        _show(repository, keys)


def _show(repository: AuthorityRepository, keys: list[Path] | None) -> None:
    names = public_names([_beside(repository.folder), *(keys or ())])
    show_standing(repository, standing(repository), names)


def _replace(authority: Path, old: str, to: Path | None, keys: list[Path] | None) -> None:
    repository = AuthorityRepository(authority)
    keyid = _keyid(repository, old)
    with repository.change(ring_of(authority, keys)) as change:
        changed = ceremony.replace_key(change, keyid, read_public_key(to) if to else None)
    typer.echo(f"{keyid[:12]} signs no more: {', '.join(changed)}.")
    _show(repository, keys)


def _keyid(repository: AuthorityRepository, text: str) -> str:
    if Path(text).is_file():
        return str(read_public_key(Path(text)).keyid)
    there = dict.fromkeys(keyid for one in ceremony.status(repository) for keyid in one.keyids)
    found = [keyid for keyid in there if keyid.startswith(text)]
    if len(found) != 1:
        what = "No key here begins" if not found else f"{len(found)} keys here begin"
        raise ProvenanceError(f"{what} with {text!r}. `cosmati keys status` lists them.")
    return found[0]


def _classes(path: Path | None) -> Taxonomy:
    return software_licences() if path is None else read_taxonomy(path)


def ring_of(authority: Path, keys: list[Path] | None) -> KeyRing:
    """Return the private keys in some folders, or in the one beside an authority's repository.

    Raises:
        ProvenanceError: there's no such folder.
    """
    folders = keys or [_beside(authority)]
    for folder in folders:
        if not folder.is_dir():
            raise ProvenanceError(f"There's no folder {folder} of keys. Name the ones that hold yours with --keys.")
    return KeyRing(folders, passphrase=_passphrase(), ask_pin=_ask_pin)


def _beside(authority: Path) -> Path:
    return authority.with_name(f"{authority.name}-keys")


def _passphrase() -> str:
    return os.environ.get("COSMATI_PASSPHRASE", "")


def _ask_pin(token: str) -> str:
    """Return a token's PIN: never an argument, which everybody on the machine could read."""
    if pin := os.environ.get("COSMATI_PIN"):
        return pin
    if not sys.stdin.isatty():
        raise ProvenanceError(f"The token {token!r} wants its PIN. Give it in COSMATI_PIN, or run this in a terminal.")
    return getpass.getpass(f"PIN of the token {token!r}: ")
